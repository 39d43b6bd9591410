"""Torch stand-ins for the Triton kernels that a speculative server launches on CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool
from sglang.srt.runtime_context import get_memory
from torch import Tensor

from sglang_parse.sgl.compat.model_changes import taken_for_triton
from sglang_parse.sgl.compat.pool_changes import keep_on_cpu
from sglang_parse.sgl.names import CPU_ATTENTION_BACKEND

# Bytes of memory that a hierarchical cache leaves free. SGLang leaves 10 GiB to the
# host beside a GPU, which a machine without one may not have.
HOST_RESERVE = 1 << 30


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


def host_memory(
    dims: tuple[int, ...], dtype: torch.dtype, device: str, **_: Any
) -> Tensor:
    """Memory of a hierarchical cache, which no GPU has to reach."""
    return torch.empty(dims, dtype=dtype, device=device)


def copy_slots(
    src_layers: Sequence[Tensor],
    dst_layers: Sequence[Tensor],
    src_indices: Tensor,
    dst_indices: Tensor,
    page_size: int,
) -> None:
    """Copy the KV of some slots from one pool to another, layer by layer.

    src_layers, dst_layers: [slots, ...] each. src_indices, dst_indices: [n] slots.
    Replaces the kernel of sgl_kernel/kvcacheio.py that `--hicache-io-backend direct`
    calls.
    """
    for source, target in zip(src_layers, dst_layers, strict=True):
        target[dst_indices] = source[src_indices]


def softcap(logits: Tensor, cap: float) -> Tensor:
    """Bound logits between -cap and cap, in place, as Gemma 2 does.

    Replaces the Triton kernel of sglang/srt/layers/logits_processor.py.
    """
    return logits.div_(cap).tanh_().mul_(cap)


def squares(queries: Tensor, keys: Tensor) -> Tensor:
    """[2 * rows] sums of squares of each row's queries, then of each row's keys.

    Replaces a Triton kernel of sglang/srt/models/minimax_m2.py, as `normalize` does.
    """
    return torch.cat([x.float().square().sum(-1) for x in (queries, keys)])


def normalize(
    queries: Tensor,
    keys: Tensor,
    query_weight: Tensor,
    key_weight: Tensor,
    sums: Tensor,
    num_ranks: int,
    eps: float,
) -> tuple[Tensor, Tensor]:
    """[rows, size] queries and keys, each divided by the root of its mean square.

    sums: [2 * rows] as from `squares`, over all ranks, of which each has `size`.
    """

    def one(x: Tensor, weight: Tensor, total: Tensor) -> Tensor:
        scale = torch.rsqrt(total / (x.shape[-1] * num_ranks) + eps)
        return (x.float() * scale[:, None] * weight).to(x.dtype)

    of_queries, of_keys = sums.chunk(2)
    return one(queries, query_weight, of_queries), one(keys, key_weight, of_keys)


def add_shared_expert(x: Tensor, gate: Tensor, shared: Tensor, output: Tensor) -> None:
    """Add what a shared expert says to what the others say, [rows, hidden] each, by a
    gate that reads its input `x`. gate: [hidden].

    Replaces a Triton kernel in sglang/srt/models/qwen2_moe.py.
    """
    output.addcmul_(torch.sigmoid(x @ gate)[:, None], shared)


def adjust_to_model(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on handle_model_specific_adjustments, where SGLang checks by name
    which backends can serve sliding windows and sinks."""
    with taken_for_triton(CPU_ATTENTION_BACKEND):
        return original(*args, **kwargs)


def skip_others_experts(
    original: Callable[..., Tensor],
    layer: Any,
    x: Tensor,
    topk_output: Any,
    *args: Any,
    **kwargs: Any,
) -> Tensor:
    """AROUND hook on moe_forward_native: experts of other ranks, which stand as -1 in
    the chosen ids, add nothing to this rank's sum.

    Triton's kernels skip them (moe/token_dispatcher/standard.py). SGLang's torch code
    would take -1 for an index, so it gets a row for each expert of ours instead.
    """
    ids, weights = topk_output.topk_ids, topk_output.topk_weights
    if bool((ids >= 0).all()):
        return original(layer, x, topk_output, *args, **kwargs)
    token, place = (ids >= 0).nonzero(as_tuple=True)
    result = torch.zeros_like(x)
    if len(token):
        ours = topk_output._replace(
            topk_ids=ids[token, place, None], topk_weights=weights[token, place, None]
        )
        outputs = original(layer, x[token], ours, *args, **kwargs)
        result.index_add_(0, token, outputs.to(x.dtype))
    return result


def build_on_cpu(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """AROUND hook on _initialize_model: a hierarchical cache beside the model keeps its
    slots in memory that no GPU reaches."""
    if get_memory().enable_hierarchical_cache:
        keep_on_cpu(host_memory, copy_slots, HOST_RESERVE)
    return original(*args, **kwargs)
