"""How many tokens of a chain are worth showing, by how sure its drafter is; pure.

A head finds each of its tokens likely or not, and where it is unsure the target mostly
disagrees. A token is shown where the chance that it stands is worth the time that its
row takes: what the target would write in that time otherwise.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul

from sglang_parse.policy.round_costs import RoundCosts
from sglang_parse.policy.survival import Survival

BINS = 10
# Tokens that a drafter's own opinion counts for in a bin, and after how many tokens of
# a bin what was seen counts for half.
OPINION, MEMORY = 16.0, 512.0


class Confidence:
    """How often tokens stand, by the chance that their drafter gives them."""

    def __init__(self) -> None:
        self._seen = [0.0] * BINS
        self._right = [0.0] * BINS

    def observe(self, chance: float, *, right: bool) -> None:
        """The target did or did not write a token that had this chance."""
        k = _bin(chance)
        self._seen[k] += 1
        self._right[k] += right
        if self._seen[k] > MEMORY:
            self._seen[k], self._right[k] = self._seen[k] / 2, self._right[k] / 2

    def of(self, chance: float) -> float:
        """The chance that such a token stands."""
        k = _bin(chance)
        return (self._right[k] + OPINION * chance) / (self._seen[k] + OPINION)


def _bin(chance: float) -> int:
    return min(BINS - 1, int(BINS * chance))


@dataclass(frozen=True)
class ChainRule:
    """What a round's chains are cut by.

    costs: of rounds of about `bs` requests. plain_ms: of a plain round. rate: tokens a
    millisecond that rounds give now. agreement: of chains so far, by their lengths.
    """

    bs: int
    costs: RoundCosts
    plain_ms: float
    rate: float
    confidence: Confidence
    agreement: Survival

    def starts(self, chances: Sequence[float], steps: int) -> list[bool]:
        """Which chains are worth going on with.

        chances: of each one's first token, which is there already. steps: its length
        if it goes on.
        """
        first = max(1e-6, self.agreement.survive(1))
        later = [self.agreement.survive(k) / first for k in range(1, steps + 1)]
        chains = [[self.confidence.of(p) * share for share in later] for p in chances]
        step_ms = self.costs.token_draft.ms(steps)
        return [num > 0 for num in self._best(chains, step_ms)]

    def lengths(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """How many tokens of each chain to show.

        chances: of each token, if those before it stand.
        """
        of = self.confidence.of
        return self._best([list(accumulate(map(of, one), mul)) for one in chances])

    def _best(
        self, chains: Sequence[Sequence[float]], extra_ms: float = 0.0
    ) -> list[int]:
        """Lengths whose tokens outweigh most what the target does in their time.

        chains: chances that a token and all before it stand, falling. extra_ms: what
        any token at all costs besides.
        """
        shown: list[int] = []  # whose token comes next, the likeliest first
        lengths = [0] * len(chains)
        heap = [(-chain[0], i) for i, chain in enumerate(chains) if chain]
        heapq.heapify(heap)
        tokens = gain = 0.0
        best = 0
        while heap:
            chance, i = heapq.heappop(heap)
            tokens -= chance
            lengths[i] += 1
            shown.append(i)
            rows = self.bs + len(shown)
            more_ms = self.costs.verify.ms(rows) + extra_ms - self.plain_ms
            if tokens - self.rate * more_ms > gain:
                gain, best = tokens - self.rate * more_ms, len(shown)
            if lengths[i] < len(chains[i]):
                heapq.heappush(heap, (-chains[i][lengths[i]], i))
        counts = Counter(shown[:best])
        return [counts[i] for i in range(len(chains))]
