"""Milliseconds over an amount of work, fitted to what was measured; pure.

A curve holds milliseconds over an amount of work (draft steps, rows of a pass) as
averages in bins. Between them it is a straight line, and beyond them it bends so that
what was never tried looks a little cheaper than it is: it is tried then, once.

A machine is slower at times, and only what is used is measured anew. So times are kept
relative to the machine's speed, which all curves share.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

# Weight of a new time in its bin, once there are many.
SMOOTHING = 0.15
# A time this many times what is expected was held up: by a kernel's first use, or by a
# neighbour. So much of it is believed.
HELD_UP = 2.0
# Share of the cost of a known amount of work that any smaller amount has at least: of
# rows of a pass, and of steps of a loop. A loop's steps take equally long.
FIXED, FIXED_STEPS = 0.5, 0.05

# Weight of a time in the machine's speed, from bins that were seen so often.
SPEED_SMOOTHING, SPEED_SEEN = 0.3, 3
# Share of the machine's slowness that is forgotten with each time. Else it drifts while
# only one kind of work is done, and what other work took would look dearer or cheaper.
SPEED_FORGETS = 0.002
# Times that the straight line through all points counts for in each point of a loop.
STRAIGHT = 8.0
# How much more than in proportion a larger amount of work may cost.
TOLERANCE = 1.2


def half_octave(x: float) -> int:
    """Bin of an amount of work."""
    return round(2 * math.log2(max(1.0, x)))


@dataclass
class Slowness:
    """How slow the machine is now, over what it was on average."""

    value: float = 1.0

    def see(self, ratio: float) -> None:
        """A time was this many times what is expected."""
        self.value = (self.value * ratio**SPEED_SMOOTHING) ** (1 - SPEED_FORGETS)


@dataclass
class Point:
    """Milliseconds of about as much work `x`, over the machine's slowness."""

    slow: Slowness = field(default_factory=Slowness)
    x: float = 0.0
    relative_ms: float = 0.0
    count: int = 0
    #: Mean logarithm of the milliseconds for a unit of work, over the slowness.
    log_rate: float = 0.0
    #: Weight of a new time, once there are many.
    smoothing: float = SMOOTHING

    @property
    def ms(self) -> float:
        return self.relative_ms * self.slow.value

    @property
    def weight(self) -> float:
        """Times that its average is worth."""
        return min(self.count, 1 / self.smoothing)

    def add(self, x: float, ms: float, *, tells_speed: bool = True) -> None:
        if self.count and x and ms > 0:
            # By logarithms: means of times would find most times to be short.
            ratio = ms / x / (math.exp(self.log_rate) * self.slow.value)
            ratio = min(max(ratio, 1 / HELD_UP), HELD_UP)
            if tells_speed and self.count >= SPEED_SEEN:
                self.slow.see(ratio)
                ratio /= ratio**SPEED_SMOOTHING
            weight = max(self.smoothing, 1 / (self.count + 1))
            self.log_rate += weight * math.log(ratio)
        ms /= self.slow.value
        if self.count == 1 and self.relative_ms > HELD_UP * ms:
            self.count = 0  # the first one was held up
        if self.count:
            ms = min(ms, HELD_UP * self.relative_ms)
        elif x and ms > 0:
            self.log_rate = math.log(ms / x)
        self.count += 1
        weight = max(self.smoothing, 1 / self.count)
        self.x += weight * (x - self.x)
        self.relative_ms += weight * (ms - self.relative_ms)


class Curve:
    """Milliseconds over an amount of work.

    fixed: share of a known amount's cost that any smaller amount has at least. least:
    other work that takes no longer than this work; less than was tried is taken to cost
    what lies between them, if that is cheaper.
    """

    def __init__(
        self,
        slow: Slowness | None = None,
        fixed: float = FIXED,
        least: Point | None = None,
    ) -> None:
        self._slow = slow or Slowness()
        self._least = least or Point(self._slow)
        self._fixed = fixed
        self._is_loop = fixed == FIXED_STEPS
        self._points: dict[int, Point] = {}
        #: Work and milliseconds over the machine's slowness.
        self._line: list[tuple[float, float]] = []
        self.count = 0

    def add(self, x: float, ms: float, *, tells_speed: bool = True) -> None:
        """Some work took so long. tells_speed: whether it was this machine's work."""
        expected = self.ms(x) if self.count > 1 else None
        if expected is not None and half_octave(x) not in self._points:
            ms = min(ms, HELD_UP * expected)
        self._points.setdefault(half_octave(x), Point(self._slow)).add(
            x, ms, tells_speed=tells_speed
        )
        self.count += 1
        points = not_held_up(sorted(self._points.values(), key=lambda p: p.x))
        line = [(p.x, p.relative_ms) for p in points]
        if self._is_loop:
            line = straightened(line, [p.weight for p in points])
        self._line = plausible(line)

    def ms(self, x: float) -> float:
        """Expected; 0 before anything was seen."""
        return self._slow.value * self._relative_ms(x)

    def _relative_ms(self, x: float) -> float:
        line = self._line
        if not line:
            return 0.0
        if x <= line[0][0]:
            return min(_bent(x, *line[0], self._fixed), self._between(x, *line[0]))
        for (x0, ms0), (x1, ms1) in zip(line, line[1:], strict=False):
            if x <= x1:
                return ms0 + (ms1 - ms0) * (x - x0) / max(1e-9, x1 - x0)
        last = _bent(x, *line[-1], FIXED)
        if len(line) < 2:
            return last
        (x0, ms0), (x1, ms1) = line[-2:]
        slope = max(0.0, (ms1 - ms0) / max(1e-9, x1 - x0))
        return max(last, ms1 + slope * (x - x1)) if x1 > 1.5 * x0 else last

    def _between(self, x: float, known: float, ms: float) -> float:
        """On the straight line from the least work to what is known."""
        least = self._least
        if least.count < 2 or not least.x < known or least.relative_ms > ms:
            return math.inf
        share = max(0.0, x - least.x) / (known - least.x)
        return least.relative_ms + share * (ms - least.relative_ms)


def _bent(x: float, known: float, ms: float, fixed: float) -> float:
    return ms * (fixed + (1 - fixed) * x / max(1e-9, known))


def not_held_up(points: Sequence[Point]) -> list[Point]:
    """Points by rising work, without those that are far dearer than more work is."""
    found: list[Point] = []
    least = math.inf
    for point in reversed(points):
        least = min(least, point.relative_ms)
        if point.relative_ms <= HELD_UP * least:
            found.append(point)
    return found[::-1]


def straightened(
    line: list[tuple[float, float]], weights: Sequence[float]
) -> list[tuple[float, float]]:
    """Points of a loop, drawn to the straight line that fits them best: its steps take
    equally long, and a few times that were long or short say little.

    weights: times that each point is worth. Errors grow with the time.
    """
    if len(line) < 3:
        return line
    pairs = zip(line, weights, strict=True)
    parts = [(w / max(1e-9, ms) ** 2, x, ms) for (x, ms), w in pairs]
    total = sum(w for w, _, _ in parts)
    x_mean = sum(w * x for w, x, _ in parts) / total
    ms_mean = sum(w * ms for w, _, ms in parts) / total
    spread = sum(w * (x - x_mean) ** 2 for w, x, _ in parts)
    slope = sum(w * (x - x_mean) * (ms - ms_mean) for w, x, ms in parts) / spread
    found = []
    for (x, ms), weight in zip(line, weights, strict=True):
        straight = ms_mean + slope * (x - x_mean)
        share = STRAIGHT / (STRAIGHT + weight)
        found.append((x, ms + share * (straight - ms) if straight > 0 else ms))
    return found


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
