"""Whether a copy of earlier text pays, and how much of it; pure.

A copy costs nothing to write, but each of its tokens is a row of the pass. How long it
lasts depends above all on how many tokens agree before it, so the chance that it ends
is learnt by that number, and from copies that nobody drafted as well.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import accumulate
from operator import mul

from sglang_parse.drafting.ngram import CopyOutcome, NgramDrafter
from sglang_parse.policy.acceptance import Rate
from sglang_parse.policy.gate import MARGIN, Gate
from sglang_parse.requests.round_records import Round
from sglang_parse.sgl.ranks import Ranks


class CopySurvival:
    """Chance that a copy ends, by the number of tokens that agree before it, in powers
    of two; at first, half as likely with each."""

    def __init__(self) -> None:
        self._ends = [Rate(0.5 ** max(1, k - 1), weight=8) for k in range(9)]

    def observe(self, outcomes: Iterable[CopyOutcome]) -> None:
        for start, end, ended in outcomes:
            for at in range(start, end + ended):
                self._at(at).observe(1, int(at == end))

    def lasts(self, evidence: int, num: int) -> list[float]:
        """Chance that each of the next `num` tokens is reached, after so many agree."""
        places = range(evidence, evidence + num)
        return list(accumulate((1 - self._at(at).value for at in places), mul))

    def _at(self, num: int) -> Rate:
        return self._ends[min(num.bit_length(), len(self._ends) - 1)]


class CopyPlanner:
    """Lets copies take the place of what is planned where they give more.

    A copy is followed token by token, and no other drafter writes after it.
    """

    def __init__(self, copier: NgramDrafter, gate: Gate, ranks: Ranks) -> None:
        self.name = copier.name
        self.copier, self.gate, self.ranks = copier, gate, ranks
        self.survival = CopySurvival()

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
            wanting = {
                i
                for i, r in enumerate(round)
                if r.state.is_exact or r.state.recovering or not r.window
            }
            ours = [0, *(len(one) * (i in wanting) for i, one in found.items())]
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
        bs, chosen = len(round), self.gate.chosen
        costs, longest = self.gate.costs.at(bs), max(r.window for r in round)
        if longest and not any(r.by_segments for r in round):
            chosen = self.gate.headed(bs, longest)
        rate = max(bs / costs.plain, chosen.rate if longest else 0.0)
        nums = [sum(p >= rate * costs.row for p in one) for one in found.values()]
        gains = [sum(one[:n]) for one, n in zip(found.values(), nums, strict=True)]
        tokens, ms = bs + sum(gains), costs.pass_ms(bs + sum(nums))
        may_be_alone = not any(r.state.pending for r in round)
        if may_be_alone and tokens / ms >= MARGIN * rate:
            return [1, *nums]
        # A round that others make long: whoever gets more of a copy takes it.
        for k, i in enumerate(found):
            own = max(1.0, rate * chosen.ms) if round.requests[i].window else 1.0
            nums[k] *= bool(longest) and 1 + gains[k] > MARGIN * own
        return [0, *nums]
