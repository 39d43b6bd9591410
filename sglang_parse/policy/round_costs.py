"""What rounds cost, by the number of their requests; pure.

`curves.py` fits the times. Reading is told from drafting here, and a round's parts are
put together.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sglang_parse.policy.curves import FIXED_STEPS, HELD_UP, Curve, Point, Slowness
from sglang_parse.policy.plain_steps import most_steps

# The same of a round that a drafter of single tokens was asked in, whose tokens differ
# much from one round to the next.
ASKED_SMOOTHING = 0.03
# Weight of a new time in what reading costs, once there are many.
READING_SMOOTHING = 0.03
# A round of which its steps took a smaller share says nothing of them, once two others
# did: what it read takes about as long as that, and never exactly.
MOSTLY_READ = 0.5
# Rounds after which the fit of it is mostly believed, and how much the tokens that were
# read have to differ.
FEW_ROUNDS, FEW_TOKENS = 4.0, 4.0


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
    plain: Point = field(default_factory=Point)
    around: Point = field(default_factory=Point)
    between: Point = field(default_factory=Point)
    #: Whether plain rounds in a row hide what they take beside their steps.
    hides: bool = False
    #: Of whole rounds in which such a drafter was asked, over the tokens they gave.
    asked: Point = field(default_factory=Point)
    #: Of the texts that the draft model read before it drafted.
    reading: Reading = field(default_factory=Reading)

    @classmethod
    def of(cls, slow: Slowness, *, hides: bool) -> RoundCosts:
        """Of a machine whose slowness all of them share. hides: whether its plain
        rounds can, as far as is known."""
        plain, asked = Point(slow), Point(slow, smoothing=ASKED_SMOOTHING)
        verify = Curve(slow, least=plain)
        return cls(
            Curve(slow, FIXED_STEPS),
            verify,
            Curve(slow),
            plain,
            around=Point(slow),
            between=Point(slow),
            hides=hides,
            asked=asked,
        )

    def add_draft(self, steps: int, num_read: int, ms: float) -> None:
        """A draft loop took so long, with the reading of so many tokens."""
        self.reading.add(steps, num_read, ms)
        steps_ms = ms - self.reading_ms(num_read)
        if self.draft.count < 2 or steps_ms > MOSTLY_READ * ms:
            self.draft.add(steps, steps_ms)

    def add_plain(
        self,
        bs: int,
        steps_ms: float,
        around_ms: float,
        num: int,
        *,
        hides: bool,
        is_first: bool = False,
    ) -> None:
        """A round of decode steps took so long, and so long beside them.

        hides: whether its first step ran beside that, so that all of it was the steps'.
        is_first: whether none could have.
        """
        if not is_first:
            self.hides = hides
        if hides:
            self.plain.add(bs, (steps_ms + around_ms) / num)
        else:
            self.plain.add(bs, steps_ms / num)
            self.around.add(bs, around_ms, tells_speed=False)

    def reading_ms(self, num_read: int) -> float:
        return self.reading.ms(num_read)

    def plain_ms(self, num_steps: int) -> float:
        """Milliseconds a decode step of rounds of so many, each alone; 0 for rounds in
        a row, of as many as they may have."""
        if num_steps:
            return self.plain.ms + self.around.ms / num_steps
        if self.hides:
            return self.plain.ms
        return self.plain.ms + self.around.ms / most_steps(self.plain.ms)

    @property
    def is_known(self) -> bool:
        """Whether two drafted rounds were seen: a first one tells little."""
        return self.draft.count > 1 and self.verify.count > 1

    @property
    def is_followed(self) -> bool:
        """The same of rounds of a drafter of single tokens, and of plain ones."""
        seen = (self.token_draft, self.verify, self.plain, self.asked)
        return all(one.count > 1 for one in seen)


def prior(plain_ms: float = 12.0) -> RoundCosts:
    """Before anything is measured of drafts: twelve steps of the draft take as long as
    a decode step of the target, and so does a short pass."""
    costs, unit = RoundCosts(), plain_ms / 12
    for x in (1, 256):
        costs.draft.add(x, unit * x)
        costs.verify.add(x, unit * (12.0 + 0.05 * x))
    costs.plain.add(1, plain_ms)
    return costs


PRIOR = prior()


class CostModel:
    """Costs by the number of requests. runs_ahead: whether a decode step may run while
    the scheduler works."""

    def __init__(self, *, runs_ahead: bool = False) -> None:
        self.runs_ahead = runs_ahead
        self._slow = Slowness()
        self._by_size: dict[int, RoundCosts] = {}

    def at(self, bs: int) -> RoundCosts:
        """To observe rounds of so many requests."""
        key = round(math.log2(bs))
        if key not in self._by_size:
            own = RoundCosts.of(self._slow, hides=self.runs_ahead)
            self._by_size[key] = own
        return self._by_size[key]

    def nearest(self, bs: int) -> RoundCosts:
        """The best that is known of rounds of so many requests."""
        key = round(math.log2(bs))
        near = sorted(self._by_size, key=lambda k: abs(k - key))
        costs = [self._by_size[k] for k in near]
        if known := next((c for c in costs if c.is_known), None):
            return known
        timed = next((c.plain.ms for c in costs if c.plain.count), 0.0)
        return prior(timed) if timed else PRIOR

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
        """A step of plain rounds of so many steps, each alone; 0 for rounds in a row.

        Until two rounds were seen, at most what a pass of a row a request would take: a
        first plain round may hold a kernel's first use.
        """
        own = self.at(bs)
        guess = self.nearest(bs).verify.ms(bs)
        if not own.plain.count:
            return guess
        ms = own.plain_ms(num_steps)
        return ms if self.knows_plain(bs) else min(ms, guess)
