"""When a drafter of single tokens stops reading what the target reads; pure.

A head reads every prompt and every token, so that it can draft. Where it does not pay,
that reading is lost time, so it rests. It then knows nothing of running requests, and
once awake it drafts for those that begin later.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import IntEnum

# Rounds of an awake head that does not pay, until it rests: it reads on meanwhile.
# Woken from a rest it waits so long for enough requests that it can draft for.
TIRED_ROUNDS, WOKEN_ROUNDS = 16, 1024
# Rounds from one look at a resting head to the next.
LOOK_ROUNDS = 32
# Rounds of its trial after a rest at most. One or two would tell little of its tokens.
TRIAL_ROUNDS = 16
# A round of so many times a plain one was held up, as by the first use of a kernel.
HELD_UP = 4.0
# Standard deviations of luck that a trial is given: it ends early if it needed more.
LUCK = 2.0
# Milliseconds of a rest: the first, and the longest. Each is twice as long as the last.
FIRST_MS, LONGEST_MS = 2_000.0, 60_000.0
# Share of the time that trials may lose, with what an awake drafter reads: a rest lasts
# as long as that takes, but so many milliseconds at most.
TRIAL_COST, LONGEST_LOST_MS = 0.01, 300_000.0


class Pays(IntEnum):
    """What asking the drafter in a round is worth."""

    NO = 0
    #: It does not, as far as is known. This round tries it.
    TRIAL = 1
    YES = 2
    #: It does not, and its trial need not go on.
    LOST = 3
    #: It did not at this number of requests, where its next trial is not due.
    NOT_YET = 4


@dataclass
class Tried:
    """What an awake drafter has given since it woke, or since it last paid.

    lost_ms: milliseconds of all rounds, over what plain ones would have taken. The
    others are of rounds of a trial: their tokens, those of plain rounds in the same
    time, and how often a request had a draft.
    """

    lost_ms: float = 0.0
    tokens: float = 0.0
    plain: float = 0.0
    num: int = 0

    def add(
        self, tokens: float, ms: float, token_ms: float, num: int | None = None
    ) -> None:
        """A round of so many tokens, which take `token_ms` each where it is plain.

        num: requests that had a draft in a round of a trial, None in other rounds. A
        chain that is too unsure to be shown is none, and its time is lost.
        """
        plain_ms = tokens * token_ms
        self.lost_ms += min(ms, HELD_UP * plain_ms) - plain_ms
        if num is not None:
            self.tokens += tokens
            self.plain += ms / token_ms
            self.num += num

    @property
    def is_lost(self) -> bool:
        """Whether not even good luck would make it pay: the tokens of a request differ
        by about one from round to round."""
        return self.tokens + LUCK * math.sqrt(max(1, self.num)) < self.plain


@dataclass
class Rest:
    """Whether it rests. Ranks that see the same `Pays` do the same."""

    resting: bool = False
    #: Rounds of its trial that are left.
    trial: int = 0
    #: On this rank.
    tried: Tried = field(default_factory=Tried)
    _rounds: int = 0
    _was_woken: bool = False
    #: By size of a round: until when it rests, and how long the next rest is.
    _until_ms: dict[int, float] = field(default_factory=dict)
    _next_ms: dict[int, float] = field(default_factory=dict)

    def is_time_to_look(self) -> bool:
        """Count a round of a rest; whether it is one to look whether to wake."""
        self._rounds += 1
        return self._rounds % LOOK_ROUNDS == 0

    def is_over(self, bs: int, ms: float) -> bool:
        """Whether a rest has been long enough for rounds of this size."""
        return ms >= self._until_ms.get(size_of(bs), 0.0)

    def wake(self) -> None:
        self.resting, self._was_woken, self._rounds = False, True, 0
        self.trial, self.tried = TRIAL_ROUNDS, Tried()

    @property
    def is_woken(self) -> bool:
        """Whether it is awake to be tried, and has not paid since."""
        return self._was_woken and not self.resting

    def may_ask(self, num_able: int, bs: int) -> bool:
        """Whether a woken drafter can draft for enough requests to be tried."""
        return not self._was_woken or 2 * num_able >= bs

    def follow(self, pays: Pays, bs: int, ms: float) -> None:
        """A round in which nobody else drafts has begun."""
        if pays == Pays.YES:
            self._rounds, self.trial, self._was_woken = 0, 0, False
            self.tried = Tried()
            self._next_ms.pop(size_of(bs), None)
            return
        if pays == Pays.NOT_YET:
            self._sleep()
            return
        self._rounds += 1
        if self.trial and pays == Pays.TRIAL:
            self.trial -= 1
        most = WOKEN_ROUNDS if self._was_woken else TIRED_ROUNDS
        is_over = pays == Pays.LOST or (pays == Pays.TRIAL and not self.trial)
        if (self._was_woken and is_over) or self._rounds >= most:
            self._rest(size_of(bs), ms)

    def _rest(self, size: int, ms: float) -> None:
        least_ms = min(self.tried.lost_ms / TRIAL_COST, LONGEST_LOST_MS)
        rest_ms = max(self._next_ms.get(size, FIRST_MS), least_ms)
        self._until_ms[size] = ms + rest_ms
        self._next_ms[size] = min(2 * rest_ms, LONGEST_MS)
        self._sleep()

    def _sleep(self) -> None:
        self.resting, self.trial, self._rounds = True, 0, 0


def size_of(bs: int) -> int:
    """Rounds of about as many requests are taken as one size."""
    return round(math.log2(bs))
