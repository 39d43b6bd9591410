"""Whether a token-level drafter, such as a head, drafts where nobody else does; pure.

A head reads every prompt and every token so that it can draft. Where it does not pay it
rests: it stops reading. It then knows nothing of the running requests, and once it is
awake it drafts for those that begin later.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from operator import mul

from sglang_parse.policy.costs import size_of
from sglang_parse.policy.trial_budget import MARGIN, Trials

# Rounds of a trial. Their mean is then compared with plain rounds.
TRIAL_ROUNDS = 16
# Standard deviations of luck that a trial is given: it ends early if it needed more.
# The tokens of a request differ by about one from round to round.
LUCK = 2.0
# Rounds without the head until it rests, and of a rest from one look to the next.
IDLE_ROUNDS, LOOK_ROUNDS = 16, 32
# Share of a round without an awake head that is lost, estimated: it reads, and only one
# decode step is taken.
READING_SHARE = 0.1
# Weight of a round in what a head gives: its tokens differ from round to round.
HEAD_SMOOTHING = 0.03
# A round counts for at most this many times a plain one of the same tokens.
LONGEST_ROUND = 4.0


@dataclass
class Measured:
    """Rounds of about one size with the head: means of tokens and milliseconds, and
    what they lost over plain rounds."""

    tokens: float = 0.0
    ms: float = 0.0
    count: int = 0
    lost_ms: float = 0.0
    trials: Trials = field(default_factory=Trials)


class HeadGate:
    """What rounds with the head give, and whether it rests. Ranks that are told the
    same answers rest and wake alike."""

    def __init__(self) -> None:
        self.rests = False
        self._sizes: dict[int, Measured] = defaultdict(Measured)
        self._num_idle = 0
        #: Whether it is awake to be tried.
        self.is_woken = False

    def rate(self, bs: int) -> float:
        """Tokens per millisecond of rounds with the head, 0 until a trial is over."""
        own = self._sizes[size_of(bs)]
        return own.tokens / own.ms if own.count >= TRIAL_ROUNDS else 0.0

    def num_rounds(self, bs: int) -> int:
        return self._sizes[size_of(bs)].count

    def may_ask(self, bs: int, plain_rate: float, now_ms: float) -> bool:
        """Whether the head pays, its trial goes on, or another one is due."""
        own = self._sizes[size_of(bs)]
        pays = self.rate(bs) >= MARGIN * plain_rate
        return pays or own.count < TRIAL_ROUNDS or own.trials.is_due(now_ms)

    def asks(self, bs: int, num_able: int, plain_rate: float, now_ms: float) -> bool:
        """What this rank would do. num_able: requests that the head can draft for; a
        few of many would not decide a trial."""
        if 2 * num_able < bs or not self.may_ask(bs, plain_rate, now_ms):
            return False
        own = self._sizes[size_of(bs)]
        if own.count >= TRIAL_ROUNDS and self.rate(bs) < MARGIN * plain_rate:
            own.count, own.lost_ms = 0, 0.0  # A new trial begins.
        return True

    def follow(self, bs: int, answer: bool, *, plain_ms: float, now_ms: float) -> None:
        """The ranks agreed on this answer."""
        self._num_idle = 0 if answer else self._num_idle + 1
        self.is_woken = self.is_woken and not answer
        if self._num_idle == IDLE_ROUNDS:
            self.rests, self.is_woken, self._num_idle = True, False, 0
            lost_ms = READING_SHARE * IDLE_ROUNDS * plain_ms
            self._sizes[size_of(bs)].trials.charge(now_ms, lost_ms)

    def is_time_to_look(self) -> bool:
        """Count a round of a rest; whether to look if it is over."""
        self._num_idle += 1
        return self._num_idle % LOOK_ROUNDS == 0

    def wake(self) -> None:
        self.rests, self.is_woken, self._num_idle = False, True, 0

    def learn(
        self, bs: int, tokens: int, ms: float, *, plain_ms: float, now_ms: float
    ) -> None:
        """A round with the head. plain_ms: a plain one of as many requests."""
        own = self._sizes[size_of(bs)]
        ms = min(ms, LONGEST_ROUND * plain_ms * tokens / bs)
        own.count += 1
        weight = max(HEAD_SMOOTHING, 1 / own.count)
        own.tokens += weight * (tokens - own.tokens)
        own.ms += weight * (ms - own.ms)
        own.lost_ms += ms - plain_ms * tokens / bs
        is_hopeless = own.lost_ms > LUCK * math.sqrt(own.count / bs) * plain_ms
        if own.count == TRIAL_ROUNDS or (own.count < TRIAL_ROUNDS and is_hopeless):
            own.count = TRIAL_ROUNDS
            if own.lost_ms < 0:
                own.trials.won()
            own.trials.charge(now_ms, own.lost_ms)


@dataclass(frozen=True)
class ChainRule:
    """What the chains of a round are cut by.

    least: the chance to stand that outweighs the time of a row. fixed: tokens that the
    pass costs besides. trust: tokens that stood, over what the head expected.
    """

    least: float
    fixed: float
    trust: float = 1.0

    def starts(self, chances: Sequence[float], steps: int) -> list[bool]:
        """Which chains go on, by the chance of each one's first token."""
        return [self.trust * p >= self.least for p in chances]

    def choose(self, chances: Sequence[Sequence[float]]) -> list[int]:
        """How many tokens of each chain to show. chances: of each token, in the head's
        opinion, if those before it stand."""
        gain, nums = -self.fixed, []
        for chain in chances:
            stand = accumulate((self.trust * p for p in chain), mul)
            shown = [p for p in stand if p >= self.least]
            gain += sum(shown) - self.least * len(shown)
            nums.append(len(shown))
        return nums if gain > 0 else [0] * len(nums)
