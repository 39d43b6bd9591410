"""KV slots of a round: the one module that takes and frees them.

PARSE takes the slots of a round inside the round (it runs without overlap), so the
scheduler's own per-round reserve stays at a few tokens and a short pool makes the
draft shorter instead of retracting requests. Draft tokens live in the request's row
of `req_to_token`, right after the committed tokens; suffix tokens live in scratch
slots that no row names and that are freed before the round returns, so the radix
cache can never hold them. Where the pool is cut into pages, rows grow and shrink by
whole pages, and scratch slots have pages of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from sglang.srt.mem_cache.allocation import (
    alloc_paged_token_slots_extend,
    alloc_token_slots,
    assign_req_to_token_pool_func,
)
from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode
from torch import Tensor

from sglang_parse.sgl.compat.pool_changes import tell_of_slots
from sglang_parse.sgl.compat.request_changes import set_allocated_len
from sglang_parse.sgl.scheduler_types import RoundBatch
from sglang_parse.sgl.upload import upload


class RoundSlots:
    """Slots of one round over SGLang's shared pool.

    max_rows: of a verify pass (capacity.longest_pass). brings_back: whether a
    hierarchical cache brings KV back into slots.
    """

    def __init__(
        self,
        req_to_token_pool: Any,
        allocator: Any,
        max_rows: int,
        *,
        brings_back: bool = False,
    ) -> None:
        self.req_to_token_pool = req_to_token_pool
        self.allocator = allocator
        self.max_rows = max_rows
        self.brings_back = brings_back

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
    def page_size(self) -> int:
        """Slots that are taken and freed together."""
        return int(getattr(self.allocator, "page_size", 1))

    @property
    def last_slot(self) -> int:
        """The highest number of a slot; the first page is never used."""
        size = int(getattr(self.allocator, "size_full", self.allocator.size))
        return size + self.page_size - 1

    def tell(self, note: Callable[[Tensor], None]) -> None:
        """Have `note` told of slots that get KV which no batch computes, before they
        get it."""
        if self.brings_back:
            tell_of_slots(self.allocator, note)

    def num_free(self, tree_cache: Any, num_rows: int = 0) -> int:
        """Slots obtainable now, evicting cached prefixes if need be, where `num_rows`
        rows are to grow: each may leave most of its last page unused."""
        allocator = self.allocator
        if not hasattr(allocator, "swa_available_size"):
            free = allocator.available_size() + tree_cache.evictable_size()
        else:
            # A token takes a slot in each of two pools (mem_cache/allocator/swa.py).
            free = min(
                allocator.full_available_size() + tree_cache.full_evictable_size(),
                allocator.swa_available_size() + tree_cache.swa_evictable_size(),
            )
        return max(0, int(free) - num_rows * (self.page_size - 1))

    def extend_rows(self, batch: RoundBatch, lens: Sequence[int]) -> None:
        """Give each request slots for columns [0, lens[i]); never shrinks a row."""
        current = [r.kv.kv_allocated_len for r in batch.reqs]
        wanted = [
            c if n <= c else self._whole_pages(n)
            for c, n in zip(current, lens, strict=True)
        ]
        # SGLang's writer does not look where a row ends (allocation.py).
        assert max(wanted) <= self.table.shape[1], (wanted, self.table.shape)
        if wanted == current:
            return
        assign_req_to_token_pool_func(
            batch.req_pool_indices,
            self.table,
            upload(current, batch.device, torch.int32),
            upload(wanted, batch.device, torch.int32),
            self._slots_behind(batch, current, wanted),
            len(current),
        )
        for req, n in zip(batch.reqs, wanted, strict=True):
            set_allocated_len(req, n)

    def trim_rows(self, batch: RoundBatch, lens: Sequence[int]) -> None:
        """Free the columns past lens[i] that the scheduler would not reserve anyway."""
        reserve = get_alloc_reserve_per_decode()
        freed = []
        rows = batch.req_pool_indices_cpu.tolist()
        for req, row, n in zip(batch.reqs, rows, lens, strict=True):
            keep = self._whole_pages(n + reserve)
            if req.kv.kv_allocated_len > keep:
                freed.append(self.table[row, keep : req.kv.kv_allocated_len])
                set_allocated_len(req, keep)
        if freed:
            self.allocator.free(torch.cat(freed).to(torch.int64))

    def take_scratch(self, tree_cache: Any, num_slots: int) -> Tensor:
        """[num_slots] int64 scratch slots; give them back with `release_scratch`."""
        if num_slots == 0:
            return torch.empty(0, dtype=torch.int64, device=self.table.device)
        taken = alloc_token_slots(tree_cache, self._whole_pages(num_slots))
        return taken[:num_slots].to(torch.int64)

    def release_scratch(self, slots: Tensor) -> None:
        """slots: all that `take_scratch` gave at once. A page goes back whole."""
        if slots.numel():
            self.allocator.free(slots)

    def _whole_pages(self, num_slots: int) -> int:
        return -(-num_slots // self.page_size) * self.page_size

    def _slots_behind(
        self, batch: RoundBatch, current: Sequence[int], wanted: Sequence[int]
    ) -> Tensor:
        """[sum(wanted) - sum(current)] slots, request by request: first what is
        left of each row's last page, then new pages."""
        num_new = sum(wanted) - sum(current)
        if self.page_size == 1:
            return alloc_token_slots(batch.tree_cache, num_new)
        lens = torch.tensor([current, wanted])
        on_device = upload(lens, batch.device)
        last = self.table[batch.req_pool_indices, on_device[0] - 1]
        return alloc_paged_token_slots_extend(
            tree_cache=batch.tree_cache,
            prefix_lens=on_device[0],
            prefix_lens_cpu=lens[0],
            seq_lens=on_device[1],
            seq_lens_cpu=lens[1],
            last_loc=last.to(torch.int64),
            extend_num_tokens=num_new,
        )
