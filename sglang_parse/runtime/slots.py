"""KV slots of a round: the one module that takes and frees them.

PARSE takes the slots of a round inside the round (it runs without overlap), so the
scheduler's own per-round reserve stays at a few tokens and a short pool makes the
draft shorter instead of retracting requests. Draft tokens live in the request's row
of `req_to_token`, right behind the committed tokens; suffix tokens live in scratch
slots that no row names and that are freed before the round returns, so the radix
cache can never hold them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.allocation import (
    alloc_token_slots,
    assign_req_to_token_pool_func,
)
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from torch import Tensor

from sglang_parse.runtime.compat import set_allocated_len
from sglang_parse.runtime.protocols import RoundBatch
from sglang_parse.runtime.upload import upload


class RoundSlots:
    """Slots of one round over SGLang's shared pool.

    max_rows: of a verify pass (capacity.longest_pass).
    """

    def __init__(self, req_to_token_pool: Any, allocator: Any, max_rows: int) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.allocator = allocator
        self.max_rows = max_rows

    @property
    def table(self) -> Tensor:
        """[num_rows, row_width] int32, the slot of every column of every request."""
        return self.req_to_token_pool.req_to_token

    @property
    def num_slots(self) -> int:
        """Slots that can be taken at once, which is all of the smaller pool where
        sliding windows have one of their own."""
        return int(self.allocator.size)

    @property
    def last_slot(self) -> int:
        """The highest number of a slot."""
        return int(getattr(self.allocator, "size_full", self.allocator.size))

    def num_free(self, tree_cache: Any) -> int:
        """Slots obtainable now, evicting cached prefixes if need be."""
        allocator = self.allocator
        if not hasattr(allocator, "swa_available_size"):
            return int(allocator.available_size() + tree_cache.evictable_size())
        # A token takes a slot in each of two pools (mem_cache/allocator/swa.py).
        return int(
            min(
                allocator.full_available_size() + tree_cache.full_evictable_size(),
                allocator.swa_available_size() + tree_cache.swa_evictable_size(),
            )
        )

    def extend_rows(self, batch: RoundBatch, lens: Sequence[int]) -> None:
        """Give each request slots for columns [0, lens[i]); never shrinks a row."""
        current = [r.kv.kv_allocated_len for r in batch.reqs]
        wanted = [max(c, n) for c, n in zip(current, lens, strict=True)]
        # SGLang's writer does not look where a row ends (allocation.py).
        assert max(wanted) <= self.table.shape[1], (wanted, self.table.shape)
        num_new = sum(wanted) - sum(current)
        if num_new == 0:
            return
        assign_req_to_token_pool_func(
            batch.req_pool_indices,
            self.table,
            upload(current, batch.device, torch.int32),
            upload(wanted, batch.device, torch.int32),
            alloc_token_slots(batch.tree_cache, num_new),
            len(current),
        )
        for req, n in zip(batch.reqs, wanted, strict=True):
            set_allocated_len(req, n)

    def trim_rows(self, batch: RoundBatch, lens: Sequence[int]) -> None:
        """Free the columns past lens[i] that the scheduler would not reserve anyway."""
        reserve = get_alloc_reserve_per_decode()
        freed = []
        rows = batch.req_pool_indices.tolist()
        for req, row, n in zip(batch.reqs, rows, lens, strict=True):
            keep = n + reserve
            if req.kv.kv_allocated_len > keep:
                freed.append(self.table[row, keep : req.kv.kv_allocated_len])
                set_allocated_len(req, keep)
        if freed:
            self.allocator.free(torch.cat(freed).to(torch.int64))

    def take_scratch(self, tree_cache: Any, num_slots: int) -> Tensor:
        """[num_slots] int64 scratch slots; give them back with `release_scratch`."""
        if num_slots == 0:
            return torch.empty(0, dtype=torch.int64, device=self.table.device)
        return alloc_token_slots(tree_cache, num_slots).to(torch.int64)

    def release_scratch(self, slots: Tensor) -> None:
        if slots.numel():
            self.allocator.free(slots)
