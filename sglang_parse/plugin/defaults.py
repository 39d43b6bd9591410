"""The default attention backend, set before SGLang resolves what depends on it.

`ParseAlgorithm.handle_server_args` runs near the end of the resolution, after the
attention backend is chosen (sglang/srt/arg_groups/pipeline.py).
"""

from __future__ import annotations

from typing import Any

from sglang_parse.sgl.families import family_of
from sglang_parse.sgl.model_folder import architectures_of
from sglang_parse.sgl.names import ALGORITHM, SPARSE_ATTENTION

GPU_ATTENTION_BACKEND = "flashinfer"


def default_attention_backend(server_args: Any) -> None:
    """FlashInfer for servers that name no backend, or that of the model's sparse
    attention, beside which a draft model has FlashInfer. A backend that is named for
    prefills serves decode steps too.

    It runs before the first step that chooses one. On Hopper and Blackwell SGLang would
    choose fa3 or trtllm_mha, whose verify modes know one width per batch and ignore the
    mask of a chain.
    """
    from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view

    config, chosen = resolving_view(server_args), dict[str, str]()
    backend, prefill = config.attention_backend, config.prefill_attention_backend
    if not (backend or (prefill and config.decode_attention_backend)):
        names = architectures_of(server_args.model_path, server_args.revision)
        is_sparse = any(family_of(name).chains for name in names)
        usual = SPARSE_ATTENTION if is_sparse else GPU_ATTENTION_BACKEND
        backend = chosen["attention_backend"] = prefill or usual
    own = "speculative_draft_attention_backend"
    if backend == SPARSE_ATTENTION and not getattr(config, own):
        chosen[own] = GPU_ATTENTION_BACKEND
    if chosen:
        declare_resolution(server_args, ALGORITHM, **chosen)
