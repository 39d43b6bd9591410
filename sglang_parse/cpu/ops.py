"""Torch stand-ins for the Triton kernels that a speculative server launches on CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from torch import Tensor

from sglang_parse.runtime.compat import built_on_cpu, taken_for_triton
from sglang_parse.runtime.names import CPU_ATTENTION_BACKEND


class CpuMHATokenToKVPool(MHATokenToKVPool):
    """MHA pool without the Triton KV-copy kernel (memory_pool.py, `_init_kv_copy`).

    PARSE never moves KV: the kept tokens' slots are the ones the pass wrote.
    """

    def _init_kv_copy_and_warmup(self) -> None:
        return None


def assign_req_to_token_pool(
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    start_offset: Tensor,
    end_offset: Tensor,
    out_cache_loc: Tensor,
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


def last_slots(table: Tensor, rows: Tensor, lens: Tensor) -> Tensor:
    """[bs] the slot of the last of each row's first `lens` columns, -1 for none.

    table: req_to_token. Replaces the Triton reader of
    sglang/srt/mem_cache/allocation.py, which serves pools that are cut into pages.
    """
    last = table[rows.long(), lens.long() - 1].to(lens.dtype)
    return torch.where(lens > 0, last, -1)


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Bound logits between -cap and cap, in place, as Gemma 2 does.

    Replaces the Triton kernel of sglang/srt/layers/logits_processor.py.
    """
    return logits.div_(cap).tanh_().mul_(cap)


def adjust_to_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on handle_model_specific_adjustments, where SGLang checks by name
    which backends can serve sliding windows and sinks."""
    with taken_for_triton(CPU_ATTENTION_BACKEND):
        return original(*args, **kwargs)


def build_on_cpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on _initialize_model: models are built for the CPU."""
    with built_on_cpu():
        return original(*args, **kwargs)
