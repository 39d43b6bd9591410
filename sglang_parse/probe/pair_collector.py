"""Pairs to learn a probe from, as a server keeps them: no text, no token, bounded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor


@dataclass(frozen=True)
class PairPart:
    """Some pairs. states: [n, width] float16. scores: of the question. requests: their
    ids in SGLang. indices: which verdict of its request each one is, from 0 on."""

    states: Tensor
    scores: list[float]
    requests: list[str]
    indices: list[int]
    segmenters: list[str]


class PairCollector:
    """A uniform sample of the pairs since the last `clear`, at most `most` of them.

    width: columns of the states, which are kept as float16 on the host.
    """

    def __init__(self, most: int, width: int, seed: int = 0) -> None:
        self.most = most
        self.width = width
        self.num_seen = 0
        self._states: Tensor | None = None
        self._scores = [0.0] * most
        self._requests = [""] * most
        self._indices = [0] * most
        self._segmenters = [""] * most
        self._random = random.Random(seed)
        self._counts: WeakKeyDictionary[object, int] = WeakKeyDictionary()

    def __len__(self) -> int:
        return min(self.num_seen, self.most)

    def add(
        self,
        owner: object,
        states: Tensor,
        scores: Sequence[float],
        *,
        segmenter: str,
        rid: str,
    ) -> None:
        """states: [n, width] of any dtype. owner: the request, whose id is rid."""
        if self._states is None:
            self._states = torch.zeros(self.most, self.width, dtype=torch.float16)
        index = self._counts.get(owner, 0)
        self._counts[owner] = index + len(scores)
        limit = torch.finfo(torch.float16).max
        rows = states.detach().float().clamp(-limit, limit).to("cpu", torch.float16)
        for k, (row, value) in enumerate(zip(rows, scores, strict=True), index):
            at = self._place()
            if at is not None:
                self._states[at] = row
                self._scores[at] = value
                self._requests[at] = rid
                self._indices[at] = k
                self._segmenters[at] = segmenter

    def _place(self) -> int | None:
        """Where the next pair goes, None where it is left out (reservoir sampling)."""
        self.num_seen += 1
        if self.num_seen <= self.most:
            return self.num_seen - 1
        at = self._random.randrange(self.num_seen)
        return at if at < self.most else None

    def part(self, start: int, num: int) -> PairPart:
        """Pairs from `start` on, at most `num`."""
        end = max(start, min(len(self), start + num))
        states = self._states
        if states is None:
            states = torch.zeros(0, self.width, dtype=torch.float16)
        span = slice(start, end)
        return PairPart(
            states[span],
            self._scores[span],
            self._requests[span],
            self._indices[span],
            self._segmenters[span],
        )

    def clear(self) -> None:
        """Forget all pairs."""
        self.num_seen = 0
