"""Defaults that must stand before SGLang resolves what depends on them.

`ParseAlgorithm.handle_server_args` runs near the end of the resolution, when the
attention backend is already chosen (sglang/srt/arg_groups/pipeline.py).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_parse.runtime.names import ALGORITHM, is_parse

GPU_ATTENTION_BACKEND = "flashinfer"
# FlashInfer's deterministic kernels go without the radix cache (SGLang).
DETERMINISTIC_BACKEND = "triton"


BACKEND_STEPS = (
    "handle_deterministic_inference",
    "handle_attention_backend_compatibility",
)


def register_defaults() -> None:
    """Wrap the resolution steps that choose an attention backend."""
    from sglang.srt.arg_groups.resolution_hooks import register_resolution_hook

    for step in BACKEND_STEPS:
        register_resolution_hook(step)(default_attention_backend)


def default_attention_backend(
    server_args: Any, previous: Callable[[Any], None]
) -> None:
    """FlashInfer, or Triton where answers are deterministic, for PARSE servers that
    name no backend; what is named for prefills serves decode steps as well.

    On Hopper and Blackwell SGLang would choose fa3 or trtllm_mha, whose verify modes
    know one width per batch and ignore the mask of a chain.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    config = resolving_view(server_args)
    prefill, decode = (
        config.prefill_attention_backend,
        config.decode_attention_backend,
    )
    is_open = not config.attention_backend and not (prefill and decode)
    if is_parse(config.speculative_algorithm) and is_open:
        backend = prefill or GPU_ATTENTION_BACKEND
        # The second asks for the first (SGLang's handle_deterministic_inference).
        deterministic = (
            config.enable_deterministic_inference or config.rl_on_policy_target
        )
        if deterministic and not prefill:
            backend = DETERMINISTIC_BACKEND
        declare_resolution(server_args, ALGORITHM, attention_backend=backend)
    previous(server_args)
