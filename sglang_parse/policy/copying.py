"""Whether a copy of earlier text pays, and how much of it; pure.

A copy costs nothing to write, but each of its tokens is a row of the pass. How long it
lasts depends above all on how many tokens agree before it, so the chance that it ends
is learnt by that number, and from copies that nobody drafted as well.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from operator import mul
from typing import Protocol, runtime_checkable

from sglang_parse.policy.gate import Gate
from sglang_parse.policy.trial_budget import MARGIN, Trials
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.sgl.ranks import Ranks

#: First number of agreeing tokens of each bin; a match has two at least.
STARTS = (1, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
# Tokens that the guess counts for in a bin, and after which what was seen counts half.
WEIGHT, MEMORY = 8.0, 1024.0


#: What became of a copy: tokens that agreed when it began and when it was last looked
#: at, and whether the next one ended it (`drafting.ngram.CopyOutcome`).
Ended = tuple[int, int, bool]


@runtime_checkable
class Copier(Protocol):
    """A drafter that copies earlier text."""

    name: str
    max_tokens: int

    def evidence(self, r: RequestRound) -> int:
        """Tokens that agree before the copy it could write now, 0 without one."""

    def take_outcomes(self) -> Sequence[Ended]:
        """What became of its copies since the last call, drafted or not."""


class CopySurvival:
    """Chance that a copy ends, by the number of tokens that agree before it."""

    def __init__(self) -> None:
        self._ends = [0.0] * len(STARTS)
        self._seen = [0.0] * len(STARTS)

    def observe(self, outcomes: Iterable[Ended]) -> None:
        for start, end, ended in outcomes:
            for at in range(start, end + ended):
                k = bisect_right(STARTS, at) - 1
                self._seen[k] += 1
                self._ends[k] += ended and at == end
                if self._seen[k] > MEMORY:
                    self._seen[k], self._ends[k] = MEMORY / 2, self._ends[k] / 2

    def lasts(self, evidence: int, num: int) -> list[float]:
        """Chance that each of the next `num` tokens is reached, after so many agree."""
        places = range(evidence, evidence + num)
        return list(accumulate((1 - self._chance(at) for at in places), mul))

    def _chance(self, at: int) -> float:
        k = bisect_right(STARTS, at) - 1
        guess = WEIGHT * min(0.5, 2 / (1 + STARTS[k]))
        return (self._ends[k] + guess) / (self._seen[k] + WEIGHT)


class CopyPlanner:
    """Lets copies take the place of what is planned where they give more.

    A copy is followed token by token, and no other drafter writes after it.
    """

    def __init__(self, copier: Copier, gate: Gate, ranks: Ranks) -> None:
        self.name = copier.name
        self.copier = copier
        self.gate = gate
        self.ranks = ranks
        self.survival = CopySurvival()
        self._trials = Trials()

    def plan(self, round: Round, *, adaptive: bool) -> None:
        """Change `window` and `budgets` of requests, which are planned already; and
        `judged` where no other drafter writes any more."""
        self.survival.observe(self.copier.take_outcomes())
        found = {
            i: self.survival.lasts(num, min(r.limit, self.copier.max_tokens))
            for i, r in enumerate(round)
            if r.limit and not r.state.pending and (num := self.copier.evidence(r))
        }
        if not found:
            return
        if adaptive:
            ours = self._choose(round, found)
        else:
            # Where a head writes, or nobody does.
            ours = [0]
            for i, one in found.items():
                r = round.requests[i]
                fits = r.state.is_exact or r.state.recovering or not r.window
                ours.append(len(one) if fits else 0)
        is_alone, *lengths = self.ranks.agree_all([ours])[0]
        if is_alone:
            round.judged, round.reason = False, ""
            for r in round:
                r.window, r.budgets = 0, {}
        for i, num in zip(found, lengths, strict=True):
            if num:
                r = round.requests[i]
                r.window, r.budgets = num, {self.name: num}

    def _choose(self, round: Round, found: dict[int, list[float]]) -> list[int]:
        """Whether nobody else drafts in this round, and the length of each copy, 0
        where another way gives more."""
        bs, costs, chosen = len(round), self.gate.costs, self.gate.chosen
        verify = costs.nearest(bs).verify
        drafts, rate = any(r.window for r in round), bs / costs.plain_ms(bs)
        if drafts:
            by_segments = any(r.by_segments for r in round)
            usual = chosen.rate if by_segments else self.gate.head.rate(bs)
            rate = max(rate, usual)
        least = rate * verify.slope_ms
        nums = [sum(p >= least for p in one) for one in found.values()]
        gains = [sum(one[:n]) for one, n in zip(found.values(), nums, strict=True)]
        tokens, ms = bs + sum(gains), verify.ms(bs + sum(nums))
        may_be_alone = not any(r.state.pending for r in round)
        if may_be_alone and tokens / ms >= MARGIN * rate:
            return [1, *nums]
        if not drafts:
            # The cost of a pass may be mistaken, and nobody else's rounds would tell.
            if sum(gains) < 1 or not self._trials.is_due(self.gate.ms):
                return [0] * (1 + len(nums))
            self._trials.charge(self.gate.ms, ms - tokens / rate)
            return [1, *nums]
        # A round that others make long: whoever gets more of a copy takes it.
        usual = max(1.0, rate * (chosen.ms if by_segments else ms / bs))
        for k, i in enumerate(found):
            own = usual if round.requests[i].window else 1.0
            nums[k] *= 1 + gains[k] > MARGIN * own
        return [0, *nums]
