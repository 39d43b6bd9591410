"""Which tokens of a head are worth the rows that show them to the target; pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from operator import mul


@dataclass(frozen=True)
class ChainRule:
    """What the chains of a round are cut by.

    least: the chance to stand that outweighs the time of a row. fixed: tokens that the
    pass costs besides. trust: tokens that stood, over what the head expected.
    """

    least: float
    fixed: float
    trust: float = 1.0

    def starts(self, chances: Sequence[float], steps: int) -> list[bool]:
        """Which chains go on, by the chance of each one's first token."""
        return [self.trust * p >= self.least for p in chances]

    def choose(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """How many tokens of each chain to show. chances: of each token, in the head's
        opinion, if those before it stand."""
        gain, nums = -self.fixed, []
        for chain in chances:
            stand = accumulate((self.trust * p for p in chain), mul)
            shown = [p for p in stand if p >= self.least]
            gain += sum(shown) - self.least * len(shown)
            nums.append(len(shown))
        return nums if gain > 0 else [0] * len(nums)
