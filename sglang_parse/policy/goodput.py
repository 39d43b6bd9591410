"""Tokens a millisecond that a way of running rounds gives in the long run; pure.

docs/controller.md explains the formula. Everything is an expectation over what was
measured: costs of rounds (round_costs.py) and how long drafts last (survival.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import lru_cache

from sglang_parse.policy.round_costs import RoundCosts
from sglang_parse.policy.survival import Survival

# Window lengths that are compared, in new draft tokens.
GRID = (4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024)
# Most boundaries from one verdict to the next.
MAX_EVERY = 3
# Numbers of recovering requests at which short rounds may begin.
PATIENCE = (1, 2, 3, 4, 6, 8, 12)
# Mean length of the segment around a token, over the mean length of a segment.
BIASED = 1.23
# Rounds after which what a drafter of single tokens gives is known by measurement.
ENOUGH_ASKED = 8
# Disagreements after which it is known how long the target follows drafts.
KNOWN_ENDS = 4
# Parts of a window in which the longest draft is summed up.
PARTS = 6


@dataclass
class Drafts:
    """What is known of drafts. Chances are a token.

    valid: until a verdict fails. recovering, followed: until the target disagrees,
    while it rewrites a segment and elsewhere. token_level: the same of a drafter that
    works token by token. segments: their lengths. ends: until a draft ends its answer.
    lost: that the target disagrees after the last boundary of a kept draft, whose
    remaining tokens are dropped then.
    """

    valid: Survival = field(
        default_factory=lambda: Survival(
            1 / 96, weight=48, by_length=False, memory=16384
        )
    )
    recovering: Survival = field(default_factory=lambda: Survival(0.2, weight=16))
    followed: Survival = field(default_factory=lambda: Survival(0.2, weight=16))
    token_level: Survival = field(default_factory=lambda: Survival(0.4, weight=8))
    lost: Survival = field(
        default_factory=lambda: Survival(0.2, weight=16, by_length=False, memory=1024)
    )
    segments: Survival = field(
        default_factory=lambda: Survival(1 / 24, weight=48, by_length=False)
    )
    ends: Survival = field(
        default_factory=lambda: Survival(1 / 2048, weight=256, by_length=False)
    )

    @property
    def segment_len(self) -> float:
        """Mean length of a segment in tokens."""
        return 1 / self.segments.rate

    def rewritten(self, num: float) -> float:
        """Tokens of a failing segment up to where the target disagrees, cut off at
        `num`. It agrees no longer there than elsewhere, where that is known."""
        mean = self.recovering.mean(num)
        if self.followed.num_ends >= KNOWN_ENDS:
            mean = min(mean, self.followed.mean(num))
        return mean

    def drafted(self, window: int) -> float:
        """Mean length of a draft: some end their answers before the window does."""
        return -math.expm1(-self.ends.rate * window) / self.ends.rate

    def longest(self, window: int, bs: int) -> float:
        """Mean length of the longest of so many drafts: the steps of a round."""
        return longest_of(bs, window, self.ends.rate)

    def no_boundary(self, num: float) -> float:
        """Chance that a segment is longer than so many tokens. Its spread cannot be
        learnt from drafts that are cut off: half of the mean, by a Weibull curve."""
        return math.exp(-((0.886 * num / self.segment_len) ** 2.2))


@lru_cache(maxsize=256)
def longest_of(bs: int, window: int, rate: float) -> float:
    """Mean length of the longest of `bs` drafts that end at `rate` a token."""
    part = window / PARTS
    chances = (math.exp(-rate * part * (k + 0.5)) for k in range(PARTS))
    return part * sum(1 - (1 - chance) ** bs for chance in chances)


@dataclass(frozen=True)
class Choice:
    """How rounds are run. steps: new draft tokens of a request, 0 for plain decoding.

    judged: by verdicts, else token by token. every: boundaries to a verdict. recovery:
    new draft tokens of a request that recovers, in short rounds and in long ones.
    patience: recovering requests from which on all rounds are short. writers: requests
    that get new draft tokens, 0 for all. rate: tokens a millisecond expected of it;
    round_ms: of a round.
    """

    steps: int = 0
    judged: bool = True
    every: int = 1
    recovery: int = 8
    recovery_beside: int = 8
    patience: int = 1
    writers: int = 0
    rate: float = 0.0
    round_ms: float = 0.0


@dataclass(frozen=True)
class Goodput:
    """Rates of `bs` requests.

    suffix_len: rows of the pass that a verdict takes. plain_ms: of a plain round of one
    step, as those of recovery are.
    """

    bs: int
    costs: RoundCosts
    drafts: Drafts
    suffix_len: float
    plain_ms: float

    def followed(self, most: int, *, at_best: bool = False) -> Choice:
        """Token by token, with the window that gives most. at_best: if the target
        agreed with every token."""
        choices = [
            Choice(steps=w, judged=False, rate=self.bs * tokens / ms, round_ms=ms)
            for w in windows(most)
            if (drafted := self.drafts.drafted(w))
            and (stand := drafted if at_best else self.drafts.followed.mean(drafted))
            and (tokens := 1 + stand)
            and (ms := self._round_ms(w, self.bs * (1 + drafted)))
        ]
        return max(choices, key=lambda c: c.rate, default=Choice(judged=False))

    def token_level(self, steps: int) -> Choice:
        """By a drafter of single tokens, as measured; as slow as the draft model until
        then."""
        asked = self.costs.asked
        if asked.count >= ENOUGH_ASKED:
            rate = asked.x / asked.ms
            return Choice(steps=steps, judged=False, rate=rate, round_ms=asked.ms)
        curve = self.costs.token_draft
        if curve.count < 2:
            curve = self.costs.draft
        ms = curve.ms(steps) + self.costs.verify.ms(self.bs * (1 + steps))
        tokens = 1 + self.drafts.token_level.mean(steps)
        return Choice(
            steps=steps, judged=False, rate=self.bs * tokens / ms, round_ms=ms
        )

    def judged(self, most: int, *, every: int = 0, most_ms: float = 0.0) -> Choice:
        """By verdicts, with the windows and the distance of verdicts that give most.

        every: of verdicts, 0 to choose it. most_ms: bound on a round, 0 without one.
        """
        recovery = self._recovery(most)
        spacings = [every] if every else range(1, MAX_EVERY + 1)
        # A draft that reaches no boundary is followed, whatever was planned.
        least = min(most, self.drafts.segment_len)
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
        faster; tokens that gives each in a round; milliseconds of the round."""
        found = [(0, 1.0, self.plain_ms)]
        for w in windows(most):
            tokens = 1 + self.drafts.rewritten(w)
            found.append((w, tokens, self._round_ms(w, self.bs * (1 + w))))
        return max(found, key=lambda one: one[1] / one[2])

    def _judged(
        self, window: int, every: int, recovery: tuple[int, float, float]
    ) -> Choice:
        recovered = recovery[1]
        one = JudgedRound.of(self.drafts, window, every)
        anew = JudgedRound.of(self.drafts, window, every, goes_on=False)
        # Rounds that the target takes to rewrite what failed.
        num = max(1.0, one.left / recovered)
        share = one.failure * num / (1 + one.failure * num)
        beside = min(window, self._beside(one, recovered))
        most = min(self.bs, math.ceil(share * self.bs) + 1)
        return max(
            (
                self._with_patience(one, anew, every, recovery, beside, num, k)
                for k in {min(k, most) for k in PATIENCE} | {most}
            ),
            key=lambda c: c.rate,
        )

    def _with_patience(
        self,
        one: JudgedRound,
        anew: JudgedRound,
        every: int,
        recovery: tuple[int, float, float],
        beside: int,
        num: float,
        patience: int,
    ) -> Choice:
        """Long rounds while fewer than `patience` requests recover, short ones else.

        one, anew: behind a long round, and behind a short one, which uses up what the
        last draft held behind its last boundary.
        """
        bs = self.bs
        alone, recovered, short_ms = recovery
        share = one.failure * num / (1 + one.failure * num)
        slow = min(patience - 1, bs * share)
        rows = (bs - slow) * (1 + one.reach + self.suffix_len * one.num_verdicts)
        rows += slow * (1 + beside)
        long_ms = self._round_ms(one.window, rows)
        # Short rounds to each long one: they bring back who failed in it.
        failing = (bs - slow) * one.failure
        at_once = failing / max(1e-9, 1 - (1 - one.failure) ** (bs - slow))
        shorts = max(0.0, failing - slow / num) * num / (slow + at_once)
        interrupted = min(1.0, shorts / num)
        given = one.tokens + interrupted * (anew.tokens - one.tokens)
        tokens = (bs - slow) * given + (slow + shorts * bs) * recovered
        return Choice(
            steps=one.window,
            every=every,
            recovery=alone,
            recovery_beside=beside,
            patience=patience,
            rate=tokens / (long_ms + shorts * short_ms),
            round_ms=long_ms,
        )

    def _beside(self, one: JudgedRound, recovered: float) -> int:
        """Window of a request that recovers beside others: the rows that pay.

        A token there saves the share of a round that it shortens recovery by.
        """
        row_ms = (self.costs.verify.ms(640) - self.costs.verify.ms(64)) / 576
        price = row_ms * self.bs / max(1e-9, self._round_ms(one.window, self.bs))
        for w in reversed(windows(64)):
            if self.drafts.recovering.survive(w) / recovered >= price / self.bs:
                return w
        return GRID[0]

    def _round_ms(self, window: int, rows: float) -> float:
        steps = self.drafts.longest(window, self.bs)
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
    def of(
        cls, drafts: Drafts, window: int, every: int, *, goes_on: bool = True
    ) -> JudgedRound:
        """goes_on: whether its draft goes on where the last one reached no boundary."""
        mean = drafts.segment_len
        # Drafts that end their answers are shorter, and whole to their ends.
        drafted = drafts.drafted(window)
        not_ended = math.exp(-drafts.ends.rate * window)
        # A token lies in a long segment more likely than in a short one.
        biased = BIASED * mean
        matched = 1 - drafts.lost.rate
        # If the target agrees with what the last one wrote behind its last boundary.
        held = matched * not_ended * min(biased / 2, window) if goes_on else 0.0
        unjudged = not_ended * drafts.no_boundary(window + held)
        shown = drafted + held
        reach = max(1.0, shown - not_ended * min(biased / 2, shown / 2))
        # A verdict to each `every` boundaries, and one to what is left.
        num_verdicts = max(1.0, reach / (mean * every) + (every - 1) / (2 * every))
        rate = drafts.valid.rate
        failure = 1 - math.exp(-rate * reach)
        spacing = min(reach, BIASED * reach / num_verdicts)
        kept = max(0.0, failure / rate - failure * spacing / 2)
        followed = drafts.rewritten(spacing)
        tokens = 1 + kept + failure * followed
        return cls(
            window=window,
            tokens=(1 - unjudged) * tokens
            + unjudged * (1 + drafts.followed.mean(window)),
            failure=(1 - unjudged) * failure,
            # A segment that failed lay within what was drafted.
            left=max(0.0, min(biased, shown) - 1 - followed),
            reach=reach,
            num_verdicts=num_verdicts * (1 - unjudged),
        )


def windows(most: int) -> list[int]:
    """Window lengths up to `most`, which is one of them."""
    shorter = [w for w in GRID if w < most]
    return [*shorter, most] if most > 0 else shorter


def next_window(num: int) -> int:
    """The shortest window of those compared that holds `num` draft tokens."""
    return next((w for w in GRID if w >= num), num)
