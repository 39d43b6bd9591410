"""Defaults that must stand before SGLang resolves what depends on them.

`ParseAlgorithm.handle_server_args` runs near the end of the resolution, when the
attention backend is already chosen (sglang/srt/arg_groups/pipeline.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

GPU_ATTENTION_BACKEND = "flashinfer"


def register_defaults() -> None:
    """Wrap the resolution step that chooses an attention backend."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    register_resolution_hook("handle_attention_backend_compatibility")(
        default_attention_backend
    )


def default_attention_backend(
    server_args: Any, previous: Callable[[Any], None]
) -> None:
    """FlashInfer for PARSE servers that name no backend.

    On Hopper and Blackwell SGLang would choose fa3 or trtllm_mha, whose verify modes
    know one width per batch and ignore the mask of a chain.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    config = resolving_view(server_args)
    named = (
        config.attention_backend
        or config.prefill_attention_backend
        or config.decode_attention_backend
    )
    if str(config.speculative_algorithm).upper() == "PARSE" and not named:
        declare_resolution(
            server_args, "PARSE", attention_backend=GPU_ATTENTION_BACKEND
        )
    previous(server_args)
