"""Torch stand-ins for the Triton kernels that a speculative server launches on CPU."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool


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
