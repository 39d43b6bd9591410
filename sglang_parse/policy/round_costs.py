"""What rounds cost, fitted to what they took; pure.

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

from sglang_parse.policy.plain_steps import most_steps

# Weight of a new time in its bin, once there are many.
SMOOTHING = 0.15
# The same of a round that a drafter of single tokens was asked in, whose tokens differ
# much from one round to the next.
ASKED_SMOOTHING = 0.03
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
# Weight of a new time in what reading costs, once there are many.
READING_SMOOTHING = 0.03
# A round of which its steps took a smaller share says nothing of them, once two others
# did: what it read takes about as long as that, and never exactly.
MOSTLY_READ = 0.5
# Rounds after which the fit of it is mostly believed, and how much the tokens that were
# read have to differ.
FEW_ROUNDS, FEW_TOKENS = 4.0, 4.0
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
class _Point:
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
        least: _Point | None = None,
    ) -> None:
        self._slow = slow or Slowness()
        self._least = least or _Point(self._slow)
        self._fixed = fixed
        self._is_loop = fixed == FIXED_STEPS
        self._points: dict[int, _Point] = {}
        #: Work and milliseconds over the machine's slowness.
        self._line: list[tuple[float, float]] = []
        self.count = 0

    def add(self, x: float, ms: float, *, tells_speed: bool = True) -> None:
        """Some work took so long. tells_speed: whether it was this machine's work."""
        expected = self.ms(x) if self.count > 1 else None
        if expected is not None and half_octave(x) not in self._points:
            ms = min(ms, HELD_UP * expected)
        self._points.setdefault(half_octave(x), _Point(self._slow)).add(
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


def not_held_up(points: Sequence[_Point]) -> list[_Point]:
    """Points by rising work, without those that are far dearer than more work is."""
    found: list[_Point] = []
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


@dataclass
class Reading:
    """What a token costs that a draft model reads before it drafts: by least squares
    over rounds, of which each has its steps, the tokens that it read, and its time."""

    count: int = 0
    #: Means of steps, tokens and milliseconds, and how they vary together.
    means: list[float] = field(default_factory=lambda: [0.0, 0.0, 0.0])
    spreads: dict[tuple[int, int], float] = field(default_factory=dict)

    def add(self, steps: float, num_read: float, ms: float) -> None:
        if self.count > 1:
            ms = min(ms, HELD_UP * self.means[2] + self.ms(num_read))
        self.count += 1
        weight = max(READING_SMOOTHING, 1 / self.count)
        off = [x - m for x, m in zip((steps, num_read, ms), self.means, strict=True)]
        for i, j in ((0, 0), (0, 1), (1, 1), (0, 2), (1, 2)):
            seen = self.spreads.get((i, j), 0.0)
            self.spreads[i, j] = (1 - weight) * (seen + weight * off[i] * off[j])
        self.means = [m + weight * x for m, x in zip(self.means, off, strict=True)]

    def ms(self, num_read: float) -> float:
        """Of so many tokens; 0 while nothing is known."""
        if self.count < 4:
            return 0.0
        s = self.spreads
        of_steps = s[0, 0] + 1e-3  # all may have had as many
        # While few rounds were seen, what may be the steps' time is taken as theirs.
        doubted = (1 + FEW_ROUNDS / self.count) * s[1, 1] + FEW_TOKENS**2
        apart = of_steps * doubted - s[0, 1] ** 2
        token_ms = (of_steps * s[1, 2] - s[0, 1] * s[0, 2]) / apart
        return num_read * max(0.0, token_ms)


@dataclass
class RoundCosts:
    """Costs of rounds of about as many requests (a power of two)."""

    #: Of the draft loop over its steps, and of all that follows over the pass's rows,
    #: up to the next draft.
    draft: Curve = field(default_factory=lambda: Curve(fixed=FIXED_STEPS))
    verify: Curve = field(default_factory=Curve)
    #: Of a drafter that works token by token, over its steps.
    token_draft: Curve = field(default_factory=Curve)
    #: Of a decode step; of what a round of such steps takes beside them; and of the
    #: scheduler between two rounds.
    plain: _Point = field(default_factory=_Point)
    around: _Point = field(default_factory=_Point)
    between: _Point = field(default_factory=_Point)
    #: Of whole rounds in which such a drafter was asked, over the tokens they gave.
    asked: _Point = field(default_factory=_Point)
    #: Of the texts that the draft model read before it drafted.
    reading: Reading = field(default_factory=Reading)

    @classmethod
    def of(cls, slow: Slowness) -> RoundCosts:
        """Of a machine whose slowness all of them share."""
        plain, asked = _Point(slow), _Point(slow, smoothing=ASKED_SMOOTHING)
        verify = Curve(slow, least=plain)
        return cls(
            Curve(slow, FIXED_STEPS),
            verify,
            Curve(slow),
            plain,
            around=_Point(slow),
            between=_Point(slow),
            asked=asked,
        )

    def add_draft(self, steps: int, num_read: int, ms: float) -> None:
        """A draft loop took so long, with the reading of so many tokens."""
        self.reading.add(steps, num_read, ms)
        steps_ms = ms - self.reading_ms(num_read)
        if self.draft.count < 2 or steps_ms > MOSTLY_READ * ms:
            self.draft.add(steps, steps_ms)

    def reading_ms(self, num_read: int) -> float:
        return self.reading.ms(num_read)

    def plain_ms(self, num_steps: int) -> float:
        """Milliseconds a decode step of rounds of so many."""
        return self.plain.ms + self.around.ms / num_steps

    @property
    def is_known(self) -> bool:
        """Whether two drafted rounds were seen: a first one tells little."""
        return self.draft.count > 1 and self.verify.count > 1

    @property
    def is_followed(self) -> bool:
        """The same of rounds of a drafter of single tokens, and of plain ones."""
        seen = (self.token_draft, self.verify, self.plain, self.asked)
        return all(one.count > 1 for one in seen)


#: Before anything is measured: a step of the draft is a unit, a pass costs twelve.
PRIOR = RoundCosts()
for _x in (1, 256):
    PRIOR.draft.add(_x, 1.0 * _x)
    PRIOR.verify.add(_x, 12.0 + 0.05 * _x)
PRIOR.plain.add(1, 12.0)


class CostModel:
    """Costs by the number of requests."""

    def __init__(self) -> None:
        self._slow = Slowness()
        self._by_size: dict[int, RoundCosts] = {}

    def at(self, bs: int) -> RoundCosts:
        """To observe rounds of so many requests."""
        key = round(math.log2(bs))
        if key not in self._by_size:
            self._by_size[key] = RoundCosts.of(self._slow)
        return self._by_size[key]

    def nearest(self, bs: int) -> RoundCosts:
        """The best that is known of rounds of so many requests."""
        key = round(math.log2(bs))
        near = sorted(self._by_size, key=lambda k: abs(k - key))
        return next((c for k in near if (c := self._by_size[k]).is_known), PRIOR)

    def knows_plain(self, bs: int) -> bool:
        """Whether two plain rounds were seen: a first one tells little."""
        return self.at(bs).plain.count > 1

    def step_ms(self, bs: int) -> float:
        """A decode step. Until two plain rounds were seen, what a pass of a row a
        request takes; 0 while nothing is known."""
        own = self.at(bs)
        if self.knows_plain(bs):
            return own.plain.ms
        return own.verify.ms(bs) if own.is_known else 0.0

    def plain_ms(self, bs: int, num_steps: int = 0) -> float:
        """A step of plain rounds of so many steps, 0 for as many as they may have.

        Until two rounds were seen, at most what a pass of a row a request would take: a
        first plain round may hold a kernel's first use.
        """
        own = self.at(bs)
        guess = self.nearest(bs).verify.ms(bs)
        if not own.plain.count:
            return guess
        ms = own.plain_ms(num_steps or most_steps(own.plain.ms))
        return ms if self.knows_plain(bs) else min(ms, guess)
