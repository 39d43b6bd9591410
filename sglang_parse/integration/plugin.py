"""Entry point `sglang.srt.plugins`: registers PARSE with stock SGLang.

Runs in every SGLang process before its arguments are parsed; it stays light and the
worker's imports happen in the factory.
"""

from __future__ import annotations

from typing import Any

from sglang_parse.runtime.names import ALGORITHM, CPU_ATTENTION_BACKEND


def register() -> None:
    """Register the algorithm, our attention backend and the hooks."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_parse.integration import hooks
    from sglang_parse.integration.algorithm import ParseAlgorithm
    from sglang_parse.integration.defaults import register_defaults
    from sglang_parse.integration.lazy import lazy

    add_attention_backend_choices([CPU_ATTENTION_BACKEND])
    _register_attention_backend(CPU_ATTENTION_BACKEND)
    SpeculativeAlgorithm.register(
        ALGORITHM,
        spec_class=ParseAlgorithm,
        validate_server_args=lazy("sglang_parse.integration.start_checks:validate"),
    )(_worker_class)
    register_defaults()
    hooks.register_hooks()


def _worker_class(server_args: Any) -> type:
    from sglang_parse.integration.worker import ParseWorker

    return ParseWorker


def _register_attention_backend(name: str) -> None:
    from sglang.srt.layers.attention.attention_registry import (
        register_attention_backend,
    )

    @register_attention_backend(name)
    def create(runner: Any) -> Any:
        from sglang_parse.cpu.attention import ParseTorchAttnBackend, read_latent_kv

        read_latent_kv()
        return ParseTorchAttnBackend(runner)
