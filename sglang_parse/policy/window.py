"""The window and the spacing of verdicts that give most tokens per millisecond; pure.

docs/controller.md explains the formula. It takes costs (costs.py) and chances that
drafts last (acceptance.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from sglang_parse.policy.acceptance import BIASED, Acceptance, Rate
from sglang_parse.policy.costs import Costs

# Windows that are compared, in new draft tokens of a request.
GRID = (4, 8, 16, 32, 64, 128, 256, 512, 1024)
# Most boundaries from one verdict to the next.
MAX_EVERY = 3


@dataclass(frozen=True)
class Choice:
    """How requests are served.

    steps: new draft tokens of a request, 0 for plain decoding. judged: by verdicts,
    else token by token. every: boundaries to a verdict. recovery: new draft tokens of a
    request that recovers. by_head: whether a head, where there is one, drafts for it
    instead. writers: requests that draft, 0 for all. rate: tokens per millisecond
    expected.
    """

    steps: int = 0
    judged: bool = True
    every: int = 1
    recovery: int = 8
    by_head: bool = True
    writers: int = 0
    rate: float = 0.0


@dataclass(frozen=True)
class Goodput:
    """Tokens per millisecond of device time while `costs.bs` requests draft.

    suffix_len: rows of the pass per verdict.
    """

    costs: Costs
    accept: Acceptance
    suffix_len: float

    def followed(self, most: int, agrees: Rate | None = None) -> Choice:
        """Token by token after the draft model, with the best window. agrees: chance
        that the target disagrees with a token, by default of all drafts."""
        choices, agrees = [], agrees or self.accept.followed
        for w in windows(most):
            drafted = self.accept.drafted(w)
            tokens = 1 + agrees.mean(drafted)
            choices.append(self._rated(Choice(w, False), tokens, drafted, 1 + drafted))
        return max(choices, key=lambda c: c.rate)

    def judged(self, most: int, every: int, recovery: int) -> Choice:
        """By verdicts, with the best window and spacing of verdicts. every: the
        spacing, 0 to choose it. recovery: what a request that recovers drafts."""
        spacings = [every] if every else range(1, MAX_EVERY + 1)
        # A draft that reaches no boundary is followed, whatever was planned.
        least = min(most, self.accept.segment_len)
        fitting = [w for w in windows(most) if w >= least]
        choices = [
            self._judged(Choice(w, every=e, recovery=recovery))
            for w in fitting
            for e in spacings
        ]
        return max(choices, key=lambda c: c.rate)

    def _judged(self, one: Choice) -> Choice:
        window, every = one.steps, one.every
        accept, mean = self.accept, self.accept.segment_len
        drafted, fails = accept.drafted(window), accept.valid.value
        # Drafts that end their answers are whole to their ends.
        not_ended = math.exp(-accept.ended.value * window)
        biased = BIASED * mean
        # Draft tokens after the last boundary, kept where the target agrees with them.
        held = (1 - accept.followed.value) * not_ended * min(biased / 2, window)
        shown = drafted + held
        reach = max(1.0, shown - not_ended * min(biased / 2, shown / 2))
        # A verdict at each `every`-th boundary, and one at the last.
        num_verdicts = max(1.0, reach / (mean * every) + (every - 1) / (2 * every))
        failure = 1 - math.exp(-fails * reach)
        spacing = min(reach, BIASED * reach / num_verdicts)
        kept = max(0.0, failure / fails - failure * spacing / 2)
        followed = accept.followed.mean(spacing)
        # A segment may be longer than the window; its spread is taken to be half of
        # its mean (a Weibull curve), since drafts that are cut off do not show it.
        judged = 1 - not_ended * math.exp(-((0.886 * (window + held) / mean) ** 2.2))
        tokens = judged * (1 + kept + failure * followed)
        tokens += (1 - judged) * (1 + accept.followed.mean(window))
        # Tokens that the target has to rewrite in further passes.
        left = max(0.0, min(biased, shown) - 1 - followed)
        rows = 1 + reach + self.suffix_len * num_verdicts * judged
        again = 1 + accept.followed.mean(one.recovery)
        num = judged * failure * max(1.0, left / again)
        return self._rated(one, tokens, drafted, rows, num, again)

    def _rated(
        self, one: Choice, tokens: float, drafted: float, rows: float,
        num: float = 0.0, again: float = 1.0,
    ) -> Choice:  # fmt: skip
        """The choice, with what it gives if all requests go on like that.

        tokens, drafted, rows: given by a pass, of the draft, of the pass. num: further
        passes, on average, in which the target rewrites what failed, each of which
        gives `again` tokens.

        A draft step serves all requests that draft, and a pass all whose drafts are
        complete. A pass begins once the steps that these have waited, summed, make up
        for its fixed time, which is that of `wait` steps for each request that runs
        (`Costs.most_idle_steps`). So passes are `gap` draft steps apart.
        """
        costs, bs, short = self.costs, self.costs.bs, one.recovery
        wait, others = costs.most_idle_steps / bs, 1 - 1 / bs
        half, twice = wait * num, 2 * num + 1
        gap = (half + math.sqrt(half**2 + 2 * twice * wait * drafted)) / twice + 1e-9
        recovery = short + others * max(0.0, gap - short)
        if not num:
            # All drafts are as long, and so complete at the same time.
            others, gap = 0.0, drafted
        steps = drafted + others * gap / 2 + num * recovery
        # It takes part in 1 + num passes, and so does each of the others.
        passes = (1 + num) * min(max(1.0, steps / gap / (1 + num)), bs)
        pass_ms = passes * costs.fixed + bs * costs.row * (rows + num * (1 + short))
        ms = max(steps * costs.step + pass_ms, passes * costs.plain)
        return replace(one, rate=bs * (tokens + num * again) / ms)


def windows(most: int) -> list[int]:
    """Windows up to `most`, which is one of them."""
    return [*(w for w in GRID if w < most), most]


def next_window(num: int) -> int:
    """The shortest window of the grid that holds `num` draft tokens."""
    return next((w for w in GRID if w >= num), num)
