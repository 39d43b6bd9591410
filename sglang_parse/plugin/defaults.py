"""The default attention backend, set before SGLang resolves what depends on it.

`ParseAlgorithm.handle_server_args` runs near the end of the resolution, after the
attention backend is chosen (sglang/srt/arg_groups/pipeline.py).
"""

from __future__ import annotations

from typing import Any

from sglang_parse.sgl.names import ALGORITHM

GPU_ATTENTION_BACKEND = "flashinfer"


def default_attention_backend(server_args: Any) -> None:
    """FlashInfer for servers that name no backend. A backend that is named for prefills
    serves decode steps too.

    It runs before the first step that chooses one. On Hopper and Blackwell SGLang would
    choose fa3 or trtllm_mha, whose verify modes know one width per batch and ignore the
    mask of a chain.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    config = resolving_view(server_args)
    prefill, decode = (
        config.prefill_attention_backend,
        config.decode_attention_backend,
    )
    if config.attention_backend or (prefill and decode):
        return
    backend = prefill or GPU_ATTENTION_BACKEND
    declare_resolution(server_args, ALGORITHM, attention_backend=backend)
