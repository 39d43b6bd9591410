"""Tensor-parallel ranks act on one rank's measurements, drafts and verdicts.

Every rank runs the whole round. Times differ from rank to rank, and logits may in their
last bits: what decides the shape of a pass is the first rank's. Sampled tokens are
agreed on in SGLang's sampler (sampling.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, TypeVar

import torch

Number = TypeVar("Number", int, float)


class Ranks:
    """The ranks that serve one model together."""

    def __init__(self, group: Any) -> None:
        """group: sglang's GroupCoordinator of the tensor-parallel ranks."""
        self._group = group

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that the others follow."""
        return self._group.world_size == 1 or self._group.rank_in_group == 0

    def agree(self, value: int) -> int:
        """The first rank's value. A collective: every rank calls it every time."""
        return self.agree_all([[value]])[0][0]

    def agree_on_least(self, values: Sequence[int]) -> list[int]:
        """The least of all ranks, value by value. A collective."""
        if self._group.world_size == 1:
            return list(values)
        held = torch.tensor(values, dtype=torch.int64)
        torch.distributed.all_reduce(
            held, op=torch.distributed.ReduceOp.MIN, group=self._group.cpu_group
        )
        least: list[int] = held.tolist()
        return least

    def agree_all(self, lists: Sequence[Sequence[Number]]) -> list[tuple[Number, ...]]:
        """The first rank's values, in lists of the same lengths on all ranks, of one
        type. A collective where there is any value."""
        values = [value for one in lists for value in one]
        if values and self._group.world_size > 1:
            is_int = all(isinstance(value, int) for value in values)
            held = torch.tensor(values, dtype=torch.int64 if is_int else torch.float64)
            torch.distributed.broadcast(
                held, src=self._group.ranks[0], group=self._group.cpu_group
            )
            values = held.tolist()
        rest = iter(values)
        return [tuple(islice(rest, len(one))) for one in lists]
