"""Entry point `sglang.srt.plugins`: registers PARSE with stock SGLang.

It runs in every process of every SGLang server before the arguments are parsed, so it
imports little; the worker is imported when a server needs it.
"""

from __future__ import annotations

from typing import Any

from sglang_parse.sgl.names import ALGORITHM, CPU_ATTENTION_BACKEND, is_parse


def register() -> None:
    """Register the algorithm, the hooks, the shield and, on CPU, our backend."""
    from sglang.srt.platforms import current_platform
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_parse.cpu.platform import ParseCpuPlatform
    from sglang_parse.plugin import hooks
    from sglang_parse.plugin.algorithm import ParseAlgorithm
    from sglang_parse.plugin.gating import lazy
    from sglang_parse.shield.seams import shield_servers

    SpeculativeAlgorithm.register(
        ALGORITHM,
        spec_class=ParseAlgorithm,
        # SGLang warns of those that do not. `ParseAlgorithm` switches overlap off.
        supports_overlap=True,
        validate_server_args=lazy("sglang_parse.plugin.start_checks:validate"),
    )(_worker_class)
    if isinstance(current_platform, ParseCpuPlatform):
        _register_attention_backend(CPU_ATTENTION_BACKEND)
    shield_servers(lambda server_args: is_parse(server_args.speculative_algorithm))
    hooks.register_hooks()


def _worker_class(server_args: Any) -> type:
    from sglang_parse.plugin.worker import ParseWorker

    return ParseWorker


def _register_attention_backend(name: str) -> None:
    from sglang.srt.arg_groups.choices import add_attention_backend_choices
    from sglang.srt.layers.attention.attention_registry import (
        register_attention_backend,
    )

    add_attention_backend_choices([name])

    @register_attention_backend(name)
    def create(runner: Any) -> Any:
        from sglang_parse.cpu.attention import ParseTorchAttnBackend, read_latent_kv

        read_latent_kv()
        return ParseTorchAttnBackend(runner)
