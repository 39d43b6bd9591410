"""The guard of a probe: is it still of the question's opinion? Pure.

A share of the boundaries is judged by both. From these the guard estimates how often
they agree. Once the agreement is known to lie below what is asked, the question judges
everything; the probe is still compared, and is used again when it is known to hold.
"""

from __future__ import annotations

import math
import random
from collections import deque

#: Comparisons that count, the last ones; and fewer, so that a change shows at once.
MEMORY, SHORT_MEMORY = 1024, 32
#: Comparisons of a new server that are made one after another.
FIRST = 48
#: Comparisons behind a disagreement that are made one after another.
SUSPICIOUS = 12
#: Standard deviations of the bounds: 97.5% on each side.
Z = 1.96


class ProbeGuard:
    """share: of boundaries that both judge. least: agreement that is asked for.

    All ranks that see the same comparisons draw the same boundaries.
    """

    def __init__(self, *, share: float, least: float, seed: int = 0) -> None:
        self.share = share
        self.least = least
        self.holds = True
        self.num_boundaries = 0
        self.num_compared = 0
        #: How often the guard has gone back to the question.
        self.num_fallbacks = 0
        self._seen: deque[bool] = deque(maxlen=MEMORY)
        self._suspicious = 0
        self._random = random.Random(seed)
        #: How far it is through these boundaries, and the place that is drawn: 0 to 1.
        self._phase, self._place = 0.0, self._random.random()

    @property
    def current_share(self) -> float:
        """Share of boundaries that the question is asked at."""
        if not self.share:
            return 0.0
        at_once = self.num_compared < FIRST or self._suspicious > 0
        return self.share if self.holds and not at_once else 1.0

    def draw(self) -> bool:
        """Whether the question is asked at the next boundary too.

        One of every 1/share boundaries is, at a random place among them: chance alone
        leaves no long gap.
        """
        self.num_boundaries += 1
        share = self.current_share
        if share >= 1:
            return True
        before, self._phase = self._phase, self._phase + share
        found = before <= self._place < self._phase
        if self._phase >= 1:
            self._phase, self._place = self._phase - 1, self._random.random()
        return found

    def compare(self, *, agrees: bool) -> str:
        """Note a boundary that both have judged.

        Returns one sentence when the probe falls out of use or comes back, else "".
        """
        self.num_compared += 1
        self._seen.append(agrees)
        self._suspicious = max(0, self._suspicious - 1) if agrees else SUSPICIOUS
        low, high = self.bounds
        recent = list(self._seen)[-SHORT_MEMORY:]
        high = min(high, wilson(sum(recent), len(recent))[1])
        if self.holds and high < self.least:
            self.holds = False
            self.num_fallbacks += 1
            self._seen.clear()
            return (
                f"the probe agrees with the question at most at {high:.1%} of the "
                f"boundaries, and {self.least:.1%} is asked; the question judges again"
            )
        if not self.holds and low >= self.least:
            self.holds = True
            self._suspicious = 0
            return (
                f"the probe agrees with the question at least at {low:.1%} of the "
                "boundaries; it is used again"
            )
        return ""

    @property
    def agreement(self) -> float | None:
        """Share of the last comparisons that agreed, None before the first."""
        return sum(self._seen) / len(self._seen) if self._seen else None

    @property
    def bounds(self) -> tuple[float, float]:
        """95% interval of the agreement (Wilson); (0, 1) before the first."""
        return wilson(sum(self._seen), len(self._seen))

    def as_dict(self) -> dict[str, float | int | bool | None]:
        """The guard's state, for /server_info."""
        low, high = self.bounds
        return {
            "in_use": self.holds,
            "boundaries": self.num_boundaries,
            "compared": self.num_compared,
            "agreement": self.agreement,
            "agreement_low": low,
            "agreement_high": high,
            "agreement_asked": self.least,
            "fallbacks": self.num_fallbacks,
        }


def wilson(num: int, total: int) -> tuple[float, float]:
    """95% interval of a share (Wilson 1927)."""
    if not total:
        return 0.0, 1.0
    p, zz = num / total, Z * Z
    middle = p + zz / (2 * total)
    spread = Z * math.sqrt(p * (1 - p) / total + zz / (4 * total * total))
    scale = 1 + zz / total
    return (middle - spread) / scale, (middle + spread) / scale
