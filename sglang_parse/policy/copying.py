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
from sglang_parse.requests.round_records import RequestRound, Round
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
        """Change `window` and `budgets` of requests, which are planned already."""
        self.survival.observe(self.copier.take_outcomes())
        found = {
            i: self.survival.lasts(num, min(r.limit, self.copier.max_tokens))
            for i, r in enumerate(round)
            if r.limit and not r.state.pending and (num := self.copier.evidence(r))
        }
        if not found:
            return
        ours = []
        share = 1 / (len(round) if any(r.window for r in round) else len(found))
        for i, chances in found.items():
            r = round.requests[i]
            # With fixed windows where a head writes, or nobody does.
            is_free = r.state.is_exact or r.state.recovering or not r.window
            num = len(chances) if is_free else 0
            if adaptive:
                num = self._num(r, chances, bs=len(round), share=share)
            ours.append(num)
        (lengths,) = self.ranks.agree_all([ours])
        for i, num in zip(found, lengths, strict=True):
            if num:
                r = round.requests[i]
                r.window, r.budgets = num, {self.name: num}

    def _num(
        self, r: RequestRound, chances: list[float], *, bs: int, share: float
    ) -> int:
        """Tokens of a copy, each of which is worth its row; 0 where drafts, or plain
        steps, give more. share: of what a pass takes more than a plain step."""
        costs = self.gate.costs.at(bs)
        rate = bs / costs.plain
        if r.window:
            chosen = self.gate.chosen
            drafts = chosen if r.by_segments else self.gate.headed(bs, r.window)
            rate = max(rate, drafts.rate)
        num = sum(p >= rate * costs.row for p in chances)
        more_ms = share * (costs.pass_ms(bs) - costs.plain) + costs.row * num
        gain = 1 + sum(chances[:num])
        return num if gain >= MARGIN * rate * (costs.plain / bs + more_ms) else 0
