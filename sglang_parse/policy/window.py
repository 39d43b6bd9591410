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

    suffix_len: rows of the pass per verdict.
    """

    bs: int
    costs: RoundCosts
    accept: Acceptance
    suffix_len: float

    def followed(self, most: int) -> Choice:
        """Token by token after the draft model, with the best window."""
        choices = []
        for w in windows(most):
            drafted = self.accept.drafted(w)
            tokens = 1 + self.accept.followed.mean(drafted)
            rate, ms = self._rate(tokens, drafted, 1 + drafted)
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
        accept, mean = self.accept, self.accept.segment_len
        drafted, rate = accept.drafted(window), accept.valid.value
        # Drafts that end their answers are whole to their ends.
        not_ended = math.exp(-accept.ended.value * window)
        biased = BIASED * mean
        # Draft tokens after the last boundary, kept where the target agrees with them.
        held = (1 - accept.lost.value) * not_ended * min(biased / 2, window)
        shown = drafted + held
        reach = max(1.0, shown - not_ended * min(biased / 2, shown / 2))
        # A verdict at each `every`-th boundary, and one at the last.
        num_verdicts = max(1.0, reach / (mean * every) + (every - 1) / (2 * every))
        failure = 1 - math.exp(-rate * reach)
        spacing = min(reach, BIASED * reach / num_verdicts)
        kept = max(0.0, failure / rate - failure * spacing / 2)
        followed = accept.rewritten(spacing)
        # A segment may be longer than the window; its spread is taken to be half of
        # its mean (a Weibull curve), since drafts that are cut off do not show it.
        judged = 1 - not_ended * math.exp(-((0.886 * (window + held) / mean) ** 2.2))
        tokens = judged * (1 + kept + failure * followed)
        tokens += (1 - judged) * (1 + accept.followed.mean(window))
        # Tokens that the target has to rewrite in further passes.
        left = max(0.0, min(biased, shown) - 1 - followed)
        rows = 1 + reach + self.suffix_len * num_verdicts * judged
        choices = []
        for short in RECOVERY:
            again = 1 + accept.rewritten(short)
            num = judged * failure * max(1.0, left / again)
            value, ms = self._rate(tokens, drafted, rows, num, again, short)
            choices.append(Choice(window, True, every, short, rate=value, ms=ms))
        return max(choices, key=lambda c: c.rate)

    def _rate(
        self,
        tokens: float,
        drafted: float,
        rows: float,
        num: float = 0.0,
        again: float = 1.0,
        short: int = 0,
    ) -> tuple[float, float]:
        """Tokens per millisecond if all requests go on like that; and milliseconds of
        the device for one request's draft and pass.

        tokens, drafted, rows: given by a pass, of the draft, of the pass. num: further
        passes, on average, in which the target rewrites what failed, each of which
        gives `again` tokens after drafts of `short` tokens.

        A draft step serves all requests that draft, and a pass all whose drafts are
        complete. A pass begins once the steps that these have waited, summed, make up
        for its fixed time, which is that of `wait` steps for each request that runs
        (`RoundCosts.most_idle_steps`). So passes are `gap` draft steps apart.
        """
        costs, bs = self.costs, self.bs
        step_ms, others = max(1e-9, costs.draft.slope_ms), 1 - 1 / bs
        wait = IDLE * costs.fixed_ms / step_ms
        half, twice = wait * num, 2 * num + 1
        gap = (half + math.sqrt(half**2 + 2 * twice * wait * drafted)) / twice + 1e-9
        recovery = short + others * max(0.0, gap - short)
        if not num:
            # All drafts are as long, and so complete at the same time.
            others, gap = 0.0, drafted
        steps = drafted + others * gap / 2 + num * recovery
        # It takes part in 1 + num passes, and so does each of the others.
        passes = (1 + num) * min(max(1.0, steps / gap / (1 + num)), bs)
        pass_ms = passes * costs.fixed_ms
        pass_ms += bs * costs.verify.slope_ms * (rows + num * (1 + short))
        ms = max(steps * step_ms + pass_ms, passes * costs.plain.ms)
        return bs * (tokens + num * again) / ms, ms / bs


def windows(most: int) -> list[int]:
    """Windows up to `most`, which is one of them."""
    shorter = [w for w in GRID if w < most]
    return [*shorter, most] if most > 0 else shorter


def next_window(num: int) -> int:
    """The shortest window of the grid that holds `num` draft tokens."""
    return next((w for w in GRID if w >= num), num)
