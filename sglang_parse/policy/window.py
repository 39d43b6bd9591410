"""The window and the spacing of verdicts that give most tokens per millisecond; pure.

docs/controller.md explains the formula. It takes costs (costs.py) and chances that
drafts last (acceptance.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_parse.policy.acceptance import BIASED, Acceptance
from sglang_parse.policy.costs import IDLE, RoundCosts

# Windows that are compared, in new draft tokens of a request.
GRID = (4, 8, 16, 32, 48, 64, 96, 128, 192, 256, 512, 1024)
# New draft tokens of a request that recovers: these are compared too.
RECOVERY = (4, 8, 16)
# Most boundaries from one verdict to the next.
MAX_EVERY = 3


@dataclass(frozen=True)
class Choice:
    """How requests are served.

    steps: new draft tokens of a request, 0 for plain decoding. judged: by verdicts,
    else token by token. every: boundaries to a verdict. recovery: new draft tokens of a
    request that recovers. writers: requests that draft, 0 for all. rate: tokens per
    millisecond expected; ms: of the device, for a draft of one request and its pass.
    """

    steps: int = 0
    judged: bool = True
    every: int = 1
    recovery: int = 8
    writers: int = 0
    rate: float = 0.0
    ms: float = 0.0


@dataclass(frozen=True)
class Goodput:
    """Tokens per millisecond of device time while `bs` requests draft.

    suffix_len: rows of the pass per verdict. plain_ms: a decode step of the target.
    """

    bs: int
    costs: RoundCosts
    accept: Acceptance
    suffix_len: float
    plain_ms: float

    def followed(self, most: int) -> Choice:
        """Token by token after the draft model, with the best window."""
        choices = []
        for w in windows(most):
            drafted = self.accept.drafted(w)
            tokens = 1 + self.accept.followed.mean(drafted)
            rate, ms = self._rate(Cycle(tokens, drafted, 1 + drafted))
            choices.append(Choice(steps=w, judged=False, rate=rate, ms=ms))
        return max(choices, key=lambda c: c.rate, default=Choice(judged=False))

    def judged(self, most: int, *, every: int = 0) -> Choice:
        """By verdicts, with the best window and spacing of verdicts. every: the
        spacing, 0 to choose it."""
        spacings = [every] if every else range(1, MAX_EVERY + 1)
        # A draft that reaches no boundary is followed, whatever was planned.
        least = min(most, self.accept.segment_len)
        choices = [
            self._judged(w, e) for w in windows(most) for e in spacings if w >= least
        ]
        return max(choices, key=lambda c: c.rate, default=Choice())

    def _judged(self, window: int, every: int) -> Choice:
        """With the best drafts of requests that recover."""
        one = JudgedRound.of(self.accept, window, every)
        rows = 1 + one.reach + self.suffix_len * one.num_verdicts
        steps = self.accept.drafted(window)
        choices = []
        for short in RECOVERY:
            recovered = 1 + self.accept.rewritten(short)
            # Passes that the target takes to rewrite what failed.
            num = one.failure * max(1.0, one.left / recovered)
            cycle = Cycle(one.tokens, steps, rows, num, recovered, short)
            rate, ms = self._rate(cycle)
            choices.append(
                Choice(window, every=every, recovery=short, rate=rate, ms=ms)
            )
        return max(choices, key=lambda c: c.rate)

    def _rate(self, cycle: Cycle) -> tuple[float, float]:
        """Tokens per millisecond if all requests go on like that; and milliseconds of
        the device for one request's draft and pass.

        A draft step serves all requests that draft, and a pass all whose drafts are
        complete. A pass begins once the steps that these have waited, summed, make up
        for its fixed time, which is that of `wait` steps for each request that runs
        (`RoundCosts.most_idle_steps`). So passes are `gap` draft steps apart.
        """
        costs, bs, num = self.costs, self.bs, cycle.num_recovering
        step_ms, others = max(1e-9, costs.draft.slope_ms), 1 - 1 / self.bs
        wait = IDLE * costs.fixed_ms / step_ms
        half, twice = wait * num, 2 * num + 1
        gap = (
            half + math.sqrt(half**2 + 2 * twice * wait * cycle.steps)
        ) / twice + 1e-9
        recovery = cycle.recovery + others * max(0.0, gap - cycle.recovery)
        if not num:
            # All drafts are as long, and so complete at the same time.
            others, gap = 0.0, cycle.steps
        steps = cycle.steps + others * gap / 2 + num * recovery
        # It takes part in 1 + num passes, and so does each of the others.
        passes = (1 + num) * min(max(1.0, steps / gap / (1 + num)), bs)
        rows = cycle.rows + num * (1 + cycle.recovery)
        pass_ms = passes * costs.fixed_ms + bs * costs.verify.slope_ms * rows
        ms = max(steps * step_ms + pass_ms, passes * costs.plain.ms)
        return bs * (cycle.tokens + num * cycle.recovered) / ms, ms / bs


@dataclass(frozen=True)
class Cycle:
    """A draft of one request, its pass, and what follows until the next such draft.

    tokens, steps, rows: given by the pass, of the draft, of the pass. num_recovering:
    passes in which the target then rewrites what failed, on average; recovered: tokens
    that each of them gives, after drafts of `recovery` tokens.
    """

    tokens: float
    steps: float
    rows: float
    num_recovering: float = 0.0
    recovered: float = 1.0
    recovery: int = 0


@dataclass(frozen=True)
class JudgedRound:
    """What a request that does not recover gets of one judged round.

    tokens: emitted. failure: chance that a verdict fails. left: tokens that the target
    then has to rewrite in further rounds. reach: draft tokens shown to the target.
    """

    window: int
    tokens: float
    failure: float
    left: float
    reach: float
    num_verdicts: float

    @classmethod
    def of(cls, accept: Acceptance, window: int, every: int) -> JudgedRound:
        mean = accept.segment_len
        drafted = accept.drafted(window)
        # Drafts that end their answers are whole to their ends.
        not_ended = math.exp(-accept.ended.value * window)
        biased = BIASED * mean
        # Draft tokens after the last boundary, kept where the target agrees with them.
        held = (1 - accept.lost.value) * not_ended * min(biased / 2, window)
        shown = drafted + held
        reach = max(1.0, shown - not_ended * min(biased / 2, shown / 2))
        # A verdict at each `every`-th boundary, and one at the last.
        num_verdicts = max(1.0, reach / (mean * every) + (every - 1) / (2 * every))
        rate = accept.valid.value
        failure = 1 - math.exp(-rate * reach)
        spacing = min(reach, BIASED * reach / num_verdicts)
        kept = max(0.0, failure / rate - failure * spacing / 2)
        followed = accept.rewritten(spacing)
        # A segment may be longer than the window; its spread is taken to be half of
        # its mean (a Weibull curve), since drafts that are cut off do not show it.
        unjudged = not_ended * math.exp(-((0.886 * (window + held) / mean) ** 2.2))
        tokens = (1 - unjudged) * (1 + kept + failure * followed)
        return cls(
            window=window,
            tokens=tokens + unjudged * (1 + accept.followed.mean(window)),
            failure=(1 - unjudged) * failure,
            left=max(0.0, min(biased, shown) - 1 - followed),
            reach=reach,
            num_verdicts=num_verdicts * (1 - unjudged),
        )


def windows(most: int) -> list[int]:
    """Windows up to `most`, which is one of them."""
    shorter = [w for w in GRID if w < most]
    return [*shorter, most] if most > 0 else shorter


def next_window(num: int) -> int:
    """The shortest window of the grid that holds `num` draft tokens."""
    return next((w for w in GRID if w >= num), num)
