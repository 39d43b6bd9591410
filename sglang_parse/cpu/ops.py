"""Torch stand-ins for the Triton kernels that a speculative server launches on CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

from sglang_parse.runtime.names import CPU_ATTENTION_BACKEND


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """MHA pool without the Triton KV-copy kernel (memory_pool.py, `_init_kv_copy`).

    PARSE never moves KV: the kept tokens' slots are the ones the pass wrote.
    """

    def _init_kv_copy_and_warmup(self) -> None:
        return None


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    batch_size: int,
) -> None:
    """Write new slots into `req_to_token[row, start:end]`, one request after another.

    req_pool_indices, start_offset, end_offset: [bs]; out_cache_loc: [sum(end-start)].
    Replaces the Triton writer of sglang/srt/mem_cache/allocation.py.
    """
    at = 0
    rows, starts, ends = (
        t.tolist() for t in (req_pool_indices, start_offset, end_offset)
    )
    for row, start, end in zip(rows, starts, ends, strict=True):
        req_to_token[row, start:end] = out_cache_loc[at : at + end - start]
        at += end - start


def adjust_to_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on handle_model_specific_adjustments, where SGLang checks by name
    which backends can serve sliding windows and sinks: ours can, as Triton can.

    Source: sglang/srt/arg_groups/model_hook.py, which asks `attention_backends_of` for
    these checks alone. A list of backends that plugins may add to would end the need.
    """
    from sglang.srt.arg_groups import model_hook

    asked = model_hook.attention_backends_of

    def answer(view: Any) -> tuple[str, ...]:
        return tuple(
            "triton" if name == CPU_ATTENTION_BACKEND else name for name in asked(view)
        )

    model_hook.attention_backends_of = answer
    try:
        return original(*args, **kwargs)
    finally:
        model_hook.attention_backends_of = asked
