"""Whether a copy of earlier text pays, and how much of it; pure.

A copy costs nothing to write, but each of its tokens is a row of the pass. How long
one lasts depends above all on how many tokens agree before it: a quote that has gone on
for fifty tokens goes on. The chance that it ends is learnt by that number, and from
copies that nobody drafted as well.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol, runtime_checkable

from sglang_parse.policy.controller import Controller
from sglang_parse.policy.protocols import Agreement
from sglang_parse.requests.round import RequestRound, Round

#: First number of agreeing tokens of each bin; a match has two at least.
STARTS = (1, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 128)
# Tokens that the prior counts for in a bin, and tokens after which what was seen in it
# counts for half.
WEIGHT = 8.0
MEMORY = 1024.0
# How much better a copy has to look than what would be done else.
MARGIN = 1.05
# Chances to be reached down to which tokens are copied: the one that gives most.
CHANCES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2, 0.1, 0.05, 0.02, 0.01)
# Share of the time that trials of copies may lose.
TRIAL_COST = 0.005


class Ended(Protocol):
    """What became of a copy (`drafting.ngram.CopyOutcome`)."""

    @property
    def start(self) -> int: ...
    @property
    def end(self) -> int: ...
    @property
    def ended(self) -> bool: ...


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
    """Chance a token that a copy ends, by the number of tokens that agree before it."""

    def __init__(self) -> None:
        self._ends = [0.0] * len(STARTS)
        self._seen = [0.0] * len(STARTS)

    def observe(self, outcomes: Iterable[Ended]) -> None:
        """Learn from copies."""
        for start, end, ended in ((o.start, o.end, o.ended) for o in outcomes):
            for k, low in enumerate(STARTS):
                high = STARTS[k + 1] if k + 1 < len(STARTS) else 1 << 30
                self._seen[k] += max(0, min(high, end + ended) - max(low, start))
                self._ends[k] += ended and low <= end < high
                if self._seen[k] > MEMORY:
                    self._seen[k] /= 2
                    self._ends[k] /= 2

    def mean(self, evidence: int, num: int) -> float:
        """Tokens that a copy lasts on average behind so many that agree, cut off at
        `num`."""
        alive, mean = 1.0, 0.0
        for length, survives in self._bins(evidence, num):
            # A geometric sum over the tokens of this bin.
            mean += alive * survives * (1 - survives**length) / (1 - survives)
            alive *= survives**length
        return mean

    def reach(self, evidence: int, most: int, chance: float) -> int:
        """Tokens, at most so many, that a copy lasts with this chance at least."""
        alive, num = 1.0, 0
        for length, survives in self._bins(evidence, most):
            within = int(math.log(chance / alive) / math.log(survives) + 1e-9)
            if within < length:
                return num + within
            alive *= survives**length
            num += length
        return num

    def _bins(self, evidence: int, num: int) -> Iterator[tuple[int, float]]:
        """Tokens in each bin from `evidence` on, and the chance of each to agree."""
        at, end = evidence, evidence + num
        for k in range(len(STARTS)):
            high = STARTS[k + 1] if k + 1 < len(STARTS) else end
            if at < min(high, end):
                yield min(high, end) - at, 1 - self._chance(k)
                at = min(high, end)

    def _chance(self, k: int) -> float:
        prior = min(0.5, 2 / (1 + STARTS[k]))
        chance = (self._ends[k] + WEIGHT * prior) / (self._seen[k] + WEIGHT)
        return min(max(chance, 1e-4), 0.999)


class CopyPlanner:
    """Lets copies take the place of what is planned where they give more.

    A copy is followed token by token, and nobody writes behind it.
    """

    def __init__(
        self, copier: Copier, controller: Controller, ranks: Agreement
    ) -> None:
        self.name = copier.name
        self.copier = copier
        self.controller = controller
        self.ranks = ranks
        self.survival = CopySurvival()
        self._next_trial_ms = 0.0

    def plan(self, round: Round, *, adaptive: bool) -> None:
        """Change `window` and `budgets` of requests, which are planned already; and
        `judged` where nobody else drafts any more."""
        self.survival.observe(self.copier.take_outcomes())
        found = [
            (r, evidence)
            for r in round
            if r.limit and not r.state.pending and (evidence := self.copier.evidence(r))
        ]
        if not found:
            return
        most = [min(r.limit, self.copier.max_tokens) for r, _ in found]
        if adaptive:
            nums = self.ranks.agree_all([self._choose(round, found, most)])[0]
        else:
            # Where a drafter of single tokens writes, or nobody does.
            fit = [
                r.state.is_exact or r.state.recovering or not r.window for r, _ in found
            ]
            nums = (0, *(m * bool(ok) for m, ok in zip(most, fit, strict=True)))
        is_alone, *lengths = nums
        if is_alone:
            round.judged, round.reason = False, ""
            for r in round:
                r.window, r.budgets = 0, {}
        for (r, _), num in zip(found, lengths, strict=True):
            if num:
                r.window, r.budgets = num, {self.name: num}

    def _choose(
        self,
        round: Round,
        found: Sequence[tuple[RequestRound, int]],
        most: Sequence[int],
    ) -> list[int]:
        """Whether nobody else drafts in this round, and the length of each copy, 0
        where another way gives more."""
        evidence = [e for _, e in found]
        nums, tokens, ms = self.alone(len(round), evidence, most)
        usual = {id(r): self._usual_tokens(round, r) for r in round}
        rate = self._usual_rate(round, sum(usual.values()))
        may_be_alone = not any(r.state.pending for r in round)
        if may_be_alone and tokens / ms >= MARGIN * rate:
            return [1, *nums]
        if not any(r.window for r in round):
            tries = self._tries(tokens - len(round), ms - tokens / rate)
            return [1, *nums] if tries else [0] * (1 + len(nums))
        # A round that others make long: whoever gets more of a copy takes it.
        lengths = [
            num * (1 + self.survival.mean(e, num) > MARGIN * usual[id(r)])
            for (r, e), num in zip(found, nums, strict=True)
        ]
        return [0, *lengths]

    def _usual_tokens(self, round: Round, r: RequestRound) -> float:
        """Tokens that a request gets of the round as it is planned."""
        drafts, chosen = self.controller.drafts, self.controller.chosen
        if head := max(r.budgets.values(), default=0):
            return 1 + drafts.token_level.mean(head)
        if not r.window:
            return 1.0
        if r.state.recovering or r.state.is_exact or not round.judged:
            own = drafts.recovering if r.state.recovering else drafts.followed
            return 1 + own.mean(r.window)
        return max(1.0, chosen.rate * chosen.round_ms / len(round))

    def _usual_rate(self, round: Round, tokens: float) -> float:
        """Tokens a millisecond of the round as it is planned.

        A judged round counts with the rounds of recovery behind it.
        """
        bs, costs = len(round), self.controller.costs
        if not any(r.window for r in round):
            return bs / self._plain_ms(bs)
        if round.judged and not all(r.state.recovering for r in round if r.window):
            return self.controller.chosen.rate
        steps = max((r.window for r in round if not r.budgets), default=0)
        draft_ms = costs.nearest(bs).draft.ms(steps) if steps else 0.0
        return tokens / (draft_ms + self.pass_ms(bs, bs + sum(r.window for r in round)))

    def alone(
        self, bs: int, evidence: Sequence[int], most: Sequence[int]
    ) -> tuple[list[int], float, float]:
        """Tokens of each copy in a round in which nobody else drafts; tokens of that
        round, and its milliseconds.

        bs: requests of the round. evidence, most: of those that have a copy.
        """
        found: list[tuple[list[int], float, float]] = []
        for chance in CHANCES:
            nums = [
                self.survival.reach(e, m, chance)
                for e, m in zip(evidence, most, strict=True)
            ]
            tokens = bs + sum(map(self.survival.mean, evidence, nums))
            found.append((nums, tokens, self.pass_ms(bs, bs + sum(nums))))
        return max(found, key=lambda one: one[1] / one[2])

    def _tries(self, gain: float, lost_ms: float) -> bool:
        """Whether to try what seems not to pay: what a pass costs may be mistaken, and
        nobody else's rounds would tell. gain: tokens that would be copied."""
        now = self.controller.ms
        if gain < 1 or now < self._next_trial_ms:
            return False
        self._next_trial_ms = now + max(0.0, lost_ms) / TRIAL_COST
        return True

    def pass_ms(self, bs: int, rows: float) -> float:
        """Milliseconds of a pass. Until two were seen: what is usual beside a plain
        round, or of rounds of about as many requests."""
        own = self.controller.costs.at(bs)
        if own.verify.count > 1:
            return own.verify.ms(rows)
        return self.controller.costs.nearest(bs).verify.ms(rows)

    def _plain_ms(self, bs: int) -> float:
        """Milliseconds of a plain round, which has one step beside copies."""
        own = self.controller.costs.at(bs)
        return own.plain_ms(1) if own.plain.count > 1 else self.pass_ms(bs, bs)
