"""Entry point `sglang.srt.plugins`: registers PARSE with stock SGLang.

Runs in every SGLang process before its arguments are parsed; it stays light and the
worker's imports happen in the factory.
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Register the algorithm, our attention backend and the hooks."""
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_parse import hooks
    from sglang_parse.algorithm import ParseAlgorithm, validate_server_args
    from sglang_parse.platform_entry import ATTENTION_BACKEND
    from sglang_parse.resolution import register_defaults

    add_attention_backend_choices([ATTENTION_BACKEND])
    _register_attention_backend(ATTENTION_BACKEND)
    SpeculativeAlgorithm.register(
        "PARSE",
        spec_class=ParseAlgorithm,
        validate_server_args=validate_server_args,
    )(_worker_class)
    register_defaults()
    hooks.register_hooks()


def _worker_class(server_args: Any) -> type:
    from sglang_parse.worker import ParseWorker

    return ParseWorker


def _register_attention_backend(name: str) -> None:
    from sglang.srt.layers.attention.attention_registry import (
        register_attention_backend,
    )

    @register_attention_backend(name)
    def create(runner: Any) -> Any:
        from sglang_parse.attention import ParseTorchAttnBackend

        return ParseTorchAttnBackend(runner)
