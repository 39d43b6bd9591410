"""What rounds cost, fitted to what they took; pure.

A curve holds milliseconds over an amount of work (draft steps, rows of a pass) as
averages in bins. Between them it is a straight line, and beyond them it bends so that
what was never tried looks a little cheaper than it is: it is tried then, once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

# Weight of a new time in its bin, once there are many.
SMOOTHING = 0.15
# A time this many times what is expected was held up: by a kernel's first use, or by a
# neighbour. So much of it is believed.
HELD_UP = 2.0
# Share of the cost of a known amount of work that any smaller amount has at least.
FIXED = 0.5

# How much more than in proportion a larger amount of work may cost.
TOLERANCE = 1.2


def half_octave(x: float) -> int:
    """Bin of an amount of work."""
    return round(2 * math.log2(max(1.0, x)))


@dataclass
class _Point:
    x: float = 0.0
    ms: float = 0.0
    count: int = 0

    def add(self, x: float, ms: float) -> None:
        if self.count == 1 and self.ms > HELD_UP * ms:
            self.count = 0  # the first one was held up
        if self.count:
            ms = min(ms, HELD_UP * self.ms)
        self.count += 1
        weight = max(SMOOTHING, 1 / self.count)
        self.x += weight * (x - self.x)
        self.ms += weight * (ms - self.ms)


class Curve:
    """Milliseconds over an amount of work."""

    def __init__(self) -> None:
        self._points: dict[int, _Point] = {}
        self._line: list[tuple[float, float]] = []
        self.count = 0

    def add(self, x: float, ms: float) -> None:
        expected = self.ms(x) if self.count > 1 else None
        if expected is not None and half_octave(x) not in self._points:
            ms = min(ms, HELD_UP * expected)
        self._points.setdefault(half_octave(x), _Point()).add(x, ms)
        self.count += 1
        self._line = plausible(sorted((p.x, p.ms) for p in self._points.values()))

    def ms(self, x: float) -> float:
        """Expected; 0 before anything was seen."""
        line = self._line
        if not line:
            return 0.0
        if x <= line[0][0]:
            return _bent(x, *line[0])
        for (x0, ms0), (x1, ms1) in zip(line, line[1:], strict=False):
            if x <= x1:
                return ms0 + (ms1 - ms0) * (x - x0) / max(1e-9, x1 - x0)
        last = _bent(x, *line[-1])
        if len(line) < 2:
            return last
        (x0, ms0), (x1, ms1) = line[-2:]
        slope = max(0.0, (ms1 - ms0) / max(1e-9, x1 - x0))
        return max(last, ms1 + slope * (x - x1)) if x1 > 1.5 * x0 else last


def plausible(line: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Points by rising work, those that were held up brought down.

    More work never costs less, and twice the work costs at most twice as much.
    """
    found: list[tuple[float, float]] = []
    least = math.inf
    for x, ms in reversed(line):
        least = min(least, ms)
        found.append((x, least))
    found.reverse()
    per_unit = math.inf
    for k, (x, ms) in enumerate(found):
        ms = min(ms, TOLERANCE * per_unit * x)
        per_unit = min(per_unit, ms / x)
        found[k] = x, ms
    return found


def _bent(x: float, known: float, ms: float) -> float:
    return ms * (FIXED + (1 - FIXED) * x / max(1e-9, known))


@dataclass
class RoundCosts:
    """Costs of rounds of about as many requests (a power of two)."""

    #: Of the draft loop over its steps, and of all that follows over the pass's rows.
    draft: Curve = field(default_factory=Curve)
    verify: Curve = field(default_factory=Curve)
    #: Of a drafter that works token by token, over its steps.
    token_draft: Curve = field(default_factory=Curve)
    plain: _Point = field(default_factory=_Point)

    @property
    def is_known(self) -> bool:
        """Whether two drafted rounds were seen: a first one tells little."""
        return self.draft.count > 1 and self.verify.count > 1


#: Before anything is measured: a step of the draft is a unit, a pass costs twelve.
PRIOR = RoundCosts()
for _x in (1, 256):
    PRIOR.draft.add(_x, 1.0 * _x)
    PRIOR.verify.add(_x, 12.0 + 0.05 * _x)
PRIOR.plain.add(1, 12.0)


class CostModel:
    """Costs by the number of requests."""

    def __init__(self) -> None:
        self._by_size: dict[int, RoundCosts] = {}

    def at(self, bs: int) -> RoundCosts:
        """To observe rounds of so many requests."""
        return self._by_size.setdefault(round(math.log2(bs)), RoundCosts())

    def nearest(self, bs: int) -> RoundCosts:
        """The best that is known of rounds of so many requests."""
        key = round(math.log2(bs))
        near = sorted(self._by_size, key=lambda k: abs(k - key))
        return next((c for k in near if (c := self._by_size[k]).is_known), PRIOR)

    def plain_ms(self, bs: int) -> float:
        """A plain round. Until two were seen, at most what a pass of a row a request
        would take: a first plain round may hold a kernel's first use."""
        own = self.at(bs).plain
        guess = self.nearest(bs).verify.ms(bs)
        if own.count > 1:
            return own.ms
        return min(own.ms, guess) if own.count else guess
