"""What rounds cost in milliseconds, by the number of their requests; pure.

A draft loop and a pass are straight lines over their steps and rows, fitted to the
latest times. A plain decode step is a running mean.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sglang_parse.requests.round_records import Round

# Weight of a new time in a running mean, and in the fit of a line.
SMOOTHING, FIT_SMOOTHING = 0.15, 0.02
# A time more than this many times the expected one was held up, by the first use of a
# kernel or by a neighbour on the machine. It is cut to this multiple.
HELD_UP = 2.0
# Rounds that the guess of a slope counts for in its fit, where their amounts of work
# differ by as much as their mean.
GUESSED = 0.05
# Tokens by which what a draft model reads has to differ between rounds before the cost
# of reading a token is believed, and rounds after which it is mostly believed.
READ_TOKENS, READ_ROUNDS = 4.0, 4.0
# Requests wait for this share of the steps that a pass's fixed time is worth, since
# another draft that shares it may be far from complete.
IDLE = 0.5
# Before anything is measured: draft steps that take as long as a decode step of the
# target, and the share of such a step that a further row of a pass takes.
STEPS_A_PLAIN, ROW_SHARE = 12, 0.004


@dataclass
class Mean:
    """A running mean of milliseconds."""

    ms: float = 0.0
    count: int = 0

    def add(self, ms: float) -> None:
        if self.count == 1 and self.ms > HELD_UP * ms:
            self.count = 0  # The first time included the first use of a kernel.
        if self.count:
            ms = min(ms, HELD_UP * self.ms)
        self.count += 1
        self.ms += max(SMOOTHING, 1 / self.count) * (ms - self.ms)


class Line:
    """Milliseconds over an amount of work: least squares of relative errors.

    The slope is drawn to a guess: in a loop every step takes equally long, and a pass
    of `at` rows takes as long as `anchor`, a plain decode step, or is half fixed. A
    second slope is that of the tokens which a draft model reads before it drafts.
    """

    def __init__(
        self, *, is_loop: bool, anchor: Mean | None = None, at: int = 0
    ) -> None:
        self._is_loop = is_loop
        self._anchor = anchor or Mean()
        self._at = at
        self._sums = [[0.0] * 4 for _ in range(4)]
        self._fit = (0.0, 0.0, 0.0)
        self.count = 0

    def ms(self, work: float, num_read: float = 0.0) -> float:
        """Expected; 0 before anything was seen."""
        fixed, slope, token = self._fit
        return fixed + slope * work + token * num_read

    @property
    def fixed_ms(self) -> float:
        return self._fit[0]

    @property
    def slope_ms(self) -> float:
        return self._fit[1]

    @property
    def token_ms(self) -> float:
        """Of a token that is read."""
        return self._fit[2]

    def add(self, work: float, ms: float, num_read: float = 0.0) -> None:
        if self.count > 1:
            ms = min(ms, HELD_UP * self.ms(work, num_read))
        ms = max(ms, 1e-6)
        self.count += 1
        row = (1 / ms, work / ms, num_read / ms, 1.0)
        keep = 1 - FIT_SMOOTHING
        self._sums = [
            [keep * s + a * b for s, b in zip(sums, row, strict=True)]
            for sums, a in zip(self._sums, row, strict=True)
        ]
        self._fit = self._solve()

    def _solve(self) -> tuple[float, float, float]:
        total = self._sums[0][0]
        mean = [s / total for s in self._sums[0]]

        def vary(i: int, j: int) -> float:
            return self._sums[i][j] / total - mean[i] * mean[j]

        _, work, read, ms = mean
        guess = self._guess(work, ms)
        doubt = GUESSED * work**2 / min(self.count, 1 / FIT_SMOOTHING)
        a, b, d = vary(1, 1) + doubt, vary(1, 2), vary(1, 3) + doubt * guess
        c = vary(2, 2) * (1 + READ_ROUNDS / self.count) + READ_TOKENS**2
        token = max(0.0, (a * vary(2, 3) - b * d) / (a * c - b * b))
        slope = max(0.0, (d - b * token) / a)
        ms -= token * read
        slope = min(slope, ms / work)
        return ms - slope * work, slope, token

    def _guess(self, work: float, ms: float) -> float:
        if self._is_loop:
            return ms / work
        anchor = self._anchor
        if anchor.count > 1 and self._at < work and anchor.ms < ms:
            return (ms - anchor.ms) / (work - self._at)
        return ms / work / 2


@dataclass
class RoundCosts:
    """Costs while about `bs` requests run.

    draft: a draft phase, over its steps. verify: a pass with all that follows it up to
    the next draft phase, over its rows. plain: a decode step of the target, with its
    share of the round.
    """

    bs: int
    draft: Line = field(default_factory=lambda: Line(is_loop=True))
    plain: Mean = field(default_factory=Mean)

    def __post_init__(self) -> None:
        self.verify = Line(is_loop=False, anchor=self.plain, at=self.bs)

    @property
    def is_known(self) -> bool:
        """Whether two drafted rounds were seen, as the first may hold a first use."""
        return self.draft.count > 1 and self.verify.count > 1

    @property
    def fixed_ms(self) -> float:
        """What a draft phase and a pass take, however few steps and rows they have."""
        return self.draft.fixed_ms + self.verify.fixed_ms

    @property
    def most_idle_steps(self) -> float:
        """Draft steps that requests wait for their pass, summed over these, until what
        they lose outweighs what they save: their share of a pass's fixed time.

        A request that waits loses its share of a step, so a pass's fixed time is that
        of `bs` times as many steps as fit into it.
        """
        return IDLE * self.bs * self.fixed_ms / max(1e-9, self.draft.slope_ms)


def prior(plain_ms: float = 12.0) -> RoundCosts:
    """Before anything is known of drafts. plain_ms: a decode step of the target."""
    costs = RoundCosts(1)
    costs.plain.add(plain_ms)
    for x in (1, 256):
        costs.draft.add(x, x * plain_ms / STEPS_A_PLAIN)
        costs.verify.add(x, plain_ms * (1 + ROW_SHARE * x))
    return costs


class CostModel:
    """Costs by the number of requests that run, in powers of two."""

    def __init__(self) -> None:
        self._by_size: dict[int, RoundCosts] = {}

    def at(self, bs: int) -> RoundCosts:
        """To observe rounds of `bs` requests."""
        key = size_of(bs)
        if key not in self._by_size:
            self._by_size[key] = RoundCosts(bs)
        return self._by_size[key]

    def learn(self, done: Round) -> float:
        """Milliseconds of a round. done: of the requests whose drafts were complete."""
        own, seconds = self.at(done.num_running), done.seconds
        ms, draft_ms = 1000 * sum(seconds.values()), 1000 * seconds["draft"]
        if "plain" in seconds:
            if not (done.num_draft_steps or done.num_read):
                own.plain.add(ms / done.num_steps)
            return ms
        if "verify" in seconds:
            own.verify.add(done.num_rows, ms - draft_ms)
        by_head = any(r.draft.num_token_level > r.draft.num_copied for r in done)
        if done.num_draft_steps and not by_head:
            own.draft.add(done.num_draft_steps, draft_ms, done.num_read)
        return ms

    def nearest(self, bs: int) -> RoundCosts:
        """The best that is known of drafted rounds of `bs` requests."""
        key = size_of(bs)
        near = sorted(self._by_size, key=lambda k: abs(k - key))
        costs = [self._by_size[k] for k in near]
        if known := next((c for c in costs if c.is_known), None):
            return known
        return prior(next((c.plain.ms for c in costs if c.plain.count), 12.0))

    def knows_plain(self, bs: int) -> bool:
        return self.at(bs).plain.count > 1

    def step_ms(self, bs: int) -> float:
        """A decode step; until two were seen, a pass of one row per request; 0 while
        nothing is known."""
        own = self.at(bs)
        if self.knows_plain(bs):
            return own.plain.ms
        return own.verify.ms(bs) if own.is_known else 0.0

    def plain_ms(self, bs: int) -> float:
        """The same; a guess from other numbers of requests while nothing is known."""
        own = self.at(bs)
        if self.knows_plain(bs):
            return own.plain.ms
        guess = self.nearest(bs).verify.ms(bs)
        return min(own.plain.ms, guess) if own.plain.count else guess


def size_of(bs: int) -> int:
    """The power of two that rounds of `bs` requests are counted under."""
    return round(math.log2(bs))
