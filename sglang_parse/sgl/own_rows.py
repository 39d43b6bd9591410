"""KV rows of a model in its own token space, with prefixes shared between requests.

The target's rows and its radix cache speak the target's tokens. A draft with another
tokenizer has rows of its own, over a pool of its own, and SGLang's radix cache holds
the KV of requests that have ended.
"""

from __future__ import annotations

from array import array
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.mem_cache.base_prefix_cache import (
    EvictParams,
    InsertParams,
    MatchPrefixParams,
)
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.radix_cache import RadixCache, RadixKey
from torch import Tensor


@dataclass(eq=False)
class Row:
    """The columns of one request."""

    #: Row of the table.
    index: int
    #: Leading columns whose slots belong to the radix cache.
    num_shared: int
    #: Leading columns that hold slots.
    num_slots: int
    #: Leading columns with KV of the row's tokens.
    num_cached: int
    #: The radix cache's node that is locked for this row.
    node: Any


class OwnRows:
    """Rows, slots and shared prefixes over one pool."""

    def __init__(self, pool: Any, allocator: Any) -> None:
        """pool: SGLang's ReqToTokenPool. allocator: of the slots, in pages of one."""
        self.pool = pool
        self.allocator = allocator
        self.tree = RadixCache(
            CacheInitParams(
                disable=False,
                req_to_token_pool=pool,
                token_to_kv_pool_allocator=allocator,
                page_size=1,
            )
        )
        self.rows: dict[Row, None] = {}

    @property
    def table(self) -> Tensor:
        """[rows, row width] int32, the slot of every column."""
        table: Tensor = self.pool.req_to_token
        return table

    @property
    def width(self) -> int:
        """Columns of a row."""
        return int(self.table.shape[1])

    def open(self, ids: Sequence[int]) -> Row | None:
        """A row for these tokens with the KV that is there of them, at most all but
        the last token's; None where no row is free."""
        found = self.pool.alloc_rows(1)
        if found is None:
            return None
        match = self.tree.match_prefix(MatchPrefixParams(_key(ids[:-1])))
        num, node = match.device_prefix_len, match.last_device_node
        if num:
            self.table[found[0], :num] = self.tree.path_device_indices(node).int()
        self.tree.inc_lock_ref(node)
        row = Row(found[0], num, num, num, node)
        self.rows[row] = None
        return row

    def keep(self, row: Row, kept: int) -> None:
        """Tokens after the first `kept` columns no longer belong to the row."""
        row.num_cached = min(row.num_cached, kept)
        if row.num_cached < row.num_shared:
            # The radix cache keeps its slots; the columns get others.
            self._free(row, row.num_shared, row.num_slots)
            row.num_shared = row.num_slots = row.num_cached

    def fit(self, row: Row, *, wanted: int, busy: Collection[Row]) -> bool:
        """Slots for the first `wanted` columns; False where there are not as many.

        busy: rows that may not be shortened to make room, whatever happens.
        """
        if wanted > self.width:
            return False
        num_new = wanted - row.num_slots
        if num_new <= 0:
            return True
        slots = self._take(num_new, busy)
        if slots is None:
            return False
        self.table[row.index, row.num_slots : wanted] = slots.int()
        row.num_slots = wanted
        return True

    def share(self, row: Row, ids: Sequence[int]) -> None:
        """Let requests that begin alike have the KV that this row has of `ids`."""
        num = min(len(ids), row.num_cached)
        if num <= row.num_shared:
            return
        self._give(row, ids[:num])
        match = self.tree.match_prefix(MatchPrefixParams(_key(ids[:num])))
        node = match.last_device_node
        self.table[row.index, :num] = self.tree.path_device_indices(node).int()
        self.tree.inc_lock_ref(node)
        self.tree.dec_lock_ref(row.node)
        row.node, row.num_shared = node, num

    def close(self, row: Row, ids: Sequence[int]) -> None:
        """The request has ended or left. ids: its tokens."""
        num = max(row.num_shared, min(len(ids), row.num_cached))
        if num > row.num_shared:
            self._give(row, ids[:num])
        self._free(row, num, row.num_slots)
        self.tree.dec_lock_ref(row.node)
        del self.rows[row]
        self.pool.free_rows([row.index])

    def clear(self) -> None:
        """Forget all KV. No row is open."""
        self.tree.reset()
        self.allocator.clear()
        self.pool.clear()

    def _give(self, row: Row, ids: Sequence[int]) -> None:
        """The KV of these tokens becomes the radix cache's; duplicates are freed."""
        slots = self.table[row.index, : len(ids)].to(torch.int64, copy=True)
        done = self.tree.insert(InsertParams(key=_key(ids), value=slots))
        self._free(row, row.num_shared, max(row.num_shared, done.prefix_len))

    def _take(self, num: int, busy: Collection[Row]) -> Tensor | None:
        if self.allocator.available_size() < num:
            for row in self.rows:
                if row not in busy:
                    self._shorten(row)
        missing = num - self.allocator.available_size()
        if missing > 0:
            self.tree.evict(EvictParams(num_tokens=missing))
        slots: Tensor | None = self.allocator.alloc(num)
        return slots

    def _shorten(self, row: Row) -> None:
        """Free the columns after the cached ones."""
        end = max(row.num_shared, row.num_cached)
        self._free(row, end, row.num_slots)
        row.num_slots = end

    def _free(self, row: Row, start: int, end: int) -> None:
        if end > start:
            self.allocator.free(self.table[row.index, start:end].to(torch.int64))


def _key(ids: Sequence[int]) -> RadixKey:
    return RadixKey(array("q", ids), None)
