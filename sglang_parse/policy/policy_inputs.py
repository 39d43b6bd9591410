"""What planning has to know of drafters, of the pool and of ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from sglang_parse.requests.round_records import RequestRound


class Writer(Protocol):
    """What the planner has to know of a drafter (`drafting.drafter.Drafter`)."""

    @property
    def name(self) -> str: ...
    @property
    def token_level(self) -> bool: ...
    @property
    def max_tokens(self) -> int: ...
    def can_draft(self, r: RequestRound) -> bool: ...


class SlotCounts(Protocol):
    """What the planner has to know of the pool (`sgl.slots.RoundSlots`)."""

    @property
    def max_rows(self) -> int: ...
    def num_free(self, tree_cache: Any, num_rows: int = 0) -> int: ...


class Agreement(Protocol):
    """The first rank's values on all ranks (`sgl.ranks.Ranks`)."""

    def agree(self, value: int) -> int: ...
    def agree_all(self, lists: Sequence[Sequence[Any]]) -> list[tuple[Any, ...]]: ...
