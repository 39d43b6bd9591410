"""Pairs to learn a probe from, as a server keeps them: no text, no token, bounded."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from weakref import WeakKeyDictionary

import torch
from torch import Tensor


@dataclass(frozen=True)
class Pair:
    """state: [width] float16 on the host. score: of the question. request: its id in
    SGLang. index: which verdict of its request it is, from 0 on."""

    state: Tensor
    score: float
    request: str
    index: int
    segmenter: str


class PairCollector:
    """A uniform sample of the pairs since the last `clear`, at most `most` of them."""

    def __init__(self, most: int, seed: int = 0) -> None:
        self.most = most
        self.num_seen = 0
        self.pairs: list[Pair] = []
        self._random = random.Random(seed)
        self._counts: WeakKeyDictionary[object, int] = WeakKeyDictionary()

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
        index = self._counts.get(owner, 0)
        self._counts[owner] = index + len(scores)
        limit = torch.finfo(torch.float16).max
        rows = states.detach().float().clamp(-limit, limit).to("cpu", torch.float16)
        for k, (row, score) in enumerate(zip(rows, scores, strict=True), index):
            self._put(Pair(row.clone(), score, rid, k, segmenter))

    def _put(self, pair: Pair) -> None:
        """Keep it, in place of another one, or not at all (reservoir sampling)."""
        self.num_seen += 1
        if len(self.pairs) < self.most:
            self.pairs.append(pair)
        elif (at := self._random.randrange(self.num_seen)) < self.most:
            self.pairs[at] = pair

    def clear(self) -> None:
        """Forget all pairs."""
        self.num_seen = 0
        self.pairs.clear()
