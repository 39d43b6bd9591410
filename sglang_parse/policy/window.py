"""The window and the spacing of verdicts that give most tokens per millisecond; pure.

docs/controller.md explains the formula. It takes costs of rounds (costs.py) and chances
that drafts last (acceptance.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from sglang_parse.policy.acceptance import BIASED, Acceptance
from sglang_parse.policy.costs import RoundCosts

# Windows that are compared, in new draft tokens of a request.
GRID = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# Most boundaries from one verdict to the next.
MAX_EVERY = 3
# All drafts are short while more than one of so many requests recover.
GATHERED = 8


@dataclass(frozen=True)
class Choice:
    """How rounds are run.

    steps: new draft tokens of a request, 0 for plain decoding. judged: by verdicts,
    else token by token. every: boundaries to a verdict. recovery: new draft tokens of a
    request that recovers. patience: recovering requests from which on all drafts are as
    short as theirs. writers: requests that draft, 0 for all. rate: tokens per
    millisecond expected; round_ms: expected of a round.
    """

    steps: int = 0
    judged: bool = True
    every: int = 1
    recovery: int = 8
    patience: int = 1
    writers: int = 0
    rate: float = 0.0
    round_ms: float = 0.0


@dataclass(frozen=True)
class Goodput:
    """Tokens per millisecond of `bs` requests.

    suffix_len: rows of the pass per verdict. plain_ms: a plain round of one step.
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
            ms = self._round_ms(w, self.bs * (1 + drafted))
            rate = self.bs * (1 + self.accept.followed.mean(drafted)) / ms
            choices.append(Choice(steps=w, judged=False, rate=rate, round_ms=ms))
        return max(choices, key=lambda c: c.rate, default=Choice(judged=False))

    def judged(self, most: int, *, every: int = 0, most_ms: float = 0.0) -> Choice:
        """By verdicts, with the best window and spacing of verdicts.

        every: the spacing, 0 to choose it. most_ms: bound on a round, 0 without one.
        """
        recovery = self._recovery(most)
        spacings = [every] if every else range(1, MAX_EVERY + 1)
        # A draft that reaches no boundary is followed, whatever was planned.
        least = min(most, self.accept.segment_len)
        choices = [
            self._judged(w, e, recovery)
            for w in windows(most)
            for e in spacings
            if w >= least
        ]
        if most_ms:
            short = [c for c in choices if c.round_ms <= most_ms]
            choices = short or choices[: len(list(spacings))]
        return max(choices, key=lambda c: c.rate, default=Choice())

    def _recovery(self, most: int) -> tuple[int, float, float]:
        """New draft tokens of requests that all recover, 0 where plain rounds are
        faster; tokens that a request gets of such a round; its milliseconds."""
        found = [(0, 1.0, self.plain_ms)]
        for w in windows(most):
            ms = self._round_ms(w, self.bs * (1 + w))
            found.append((w, 1 + self.accept.rewritten(w), ms))
        return max(found, key=lambda one: one[1] / one[2])

    def _judged(
        self, window: int, every: int, recovery: tuple[int, float, float]
    ) -> Choice:
        """Long rounds while few requests recover, else short ones."""
        bs, patience = self.bs, 1 + self.bs // GATHERED
        steps, recovered, short_ms = recovery
        one = JudgedRound.of(self.accept, window, every)
        # Rounds that the target takes to rewrite what failed.
        num = max(1.0, one.left / recovered)
        share = one.failure * num / (1 + one.failure * num)
        slow = min(patience - 1, bs * share)
        rows = (bs - slow) * (1 + one.reach + self.suffix_len * one.num_verdicts)
        long_ms = self._round_ms(window, rows + slow * (1 + steps))
        # Short rounds to each long one: they bring back who failed in it.
        failing = (bs - slow) * one.failure
        at_once = failing / max(1e-9, 1 - (1 - one.failure) ** (bs - slow))
        shorts = max(0.0, failing - slow / num) * num / (slow + at_once)
        tokens = (bs - slow) * one.tokens + (slow + shorts * bs) * recovered
        return Choice(
            steps=window,
            every=every,
            recovery=steps,
            patience=patience,
            rate=tokens / (long_ms + shorts * short_ms),
            round_ms=long_ms,
        )

    def _round_ms(self, window: int, rows: float) -> float:
        """The draft loop runs until the longest draft of the batch has ended."""
        # The longest of n exponential lengths is about 1 + log(n) times their mean.
        longest = (1 + math.log(self.bs)) / self.accept.ended.value
        steps = -math.expm1(-window / longest) * longest
        return self.costs.draft.ms(steps) + self.costs.verify.ms(rows)


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
