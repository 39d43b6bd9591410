"""Rows of a draft's own over SGLang's pools, without a model."""

from __future__ import annotations

import torch
from sglang.srt.mem_cache.allocator.token import TokenToKVPoolAllocator
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

from sglang_parse.sgl.own_rows import OwnRows, Row


class CheckedRows(OwnRows):
    """Knows which token each slot was written for."""

    def __init__(self, num_slots: int, num_rows: int = 4, width: int = 4096) -> None:
        pool = ReqToTokenPool(num_rows, width, "cpu", False)
        allocator = TokenToKVPoolAllocator(
            num_slots, torch.float32, "cpu", None, need_sort=False
        )
        super().__init__(pool, allocator)
        self.written = torch.full((num_slots + 1, 2), -1, dtype=torch.int64)

    def write(self, index: int, start: int, ids) -> None:
        """The model forwards these tokens from column `start` on."""
        slots = self.table[index, start : start + len(ids)].long()
        assert bool((slots > 0).all()) and len(set(slots.tolist())) == len(ids)
        places = torch.arange(start, start + len(ids))
        self.written[slots] = torch.stack([torch.tensor(ids), places], dim=1)

    def check(self, index: int, num: int, ids) -> None:
        """The first columns hold the KV of these tokens."""
        slots = self.table[index, :num].long()
        expected = torch.stack([torch.tensor(ids[:num]), torch.arange(num)], dim=1)
        assert torch.equal(self.written[slots], expected.reshape(num, 2))

    def check_whole(self) -> None:
        """Every slot is free, in the radix cache, or in exactly one row."""
        free = self.allocator.free_pages.tolist()
        tree = self.tree
        is_empty = not tree.evictable_size() + tree.protected_size()
        shared = [] if is_empty else tree.all_values_flatten().tolist()
        own = [
            slot
            for row in self.rows
            for slot in self.table[row.index, row.num_shared : row.num_slots].tolist()
        ]
        found = sorted([*free, *shared, *own])
        assert found == list(range(1, self.allocator.size + 1))


__all__ = ["CheckedRows", "Row"]
