"""Which tokens of a head are worth showing, by how sure the head is; pure.

A head finds each of its tokens likely or not, and where it is unsure the target mostly
disagrees. A token is shown where the chance that it stands is worth the time that its
row takes: what the target would write in that time otherwise.
"""

from __future__ import annotations

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
# Tokens after which what a drafter thinks of them is known well enough to cut chains.
ENOUGH_SEEN = 32


class Confidence:
    """How often tokens stand, by the chance that their drafter gives them."""

    def __init__(self) -> None:
        self._seen = [0.0] * BINS
        self._right = [0.0] * BINS

    @property
    def is_known(self) -> bool:
        """Whether enough was seen. A drafter's own opinion alone may be far off, and
        tokens that are not shown for it are never seen to stand."""
        return sum(self._seen) >= ENOUGH_SEEN

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

    costs: of rounds of about `bs` requests. plain_ms: of a plain round of one step, as
    those beside a head are. rate: tokens a millisecond that rounds give now.
    agreement: of chains so far, by their lengths.
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
        return [num > 0 for num in self._best(chains, extra_ms=step_ms)]

    def choose(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """How many tokens of each chain to show.

        chances: of each token, if those before it stand.
        """
        of = self.confidence.of
        return self._best([list(accumulate(map(of, one), mul)) for one in chances])

    def _best(
        self, chains: Sequence[Sequence[float]], *, extra_ms: float = 0.0
    ) -> list[int]:
        """Lengths that outweigh most what the target does in their time.

        chains: chances that a token and all before it stand, falling. extra_ms: what
        any token at all costs besides.
        """
        # The likeliest token first; of equal ones the first chain's.
        order = sorted((-p, i) for i, chain in enumerate(chains) for p in chain)
        tokens = gain = 0.0
        best = 0
        for num, (chance, _) in enumerate(order, 1):
            tokens -= chance
            more_ms = self.costs.verify.ms(self.bs + num) + extra_ms - self.plain_ms
            if tokens - self.rate * more_ms > gain:
                gain, best = tokens - self.rate * more_ms, num
        lengths = Counter(i for _, i in order[:best])
        return [lengths[i] for i in range(len(chains))]
