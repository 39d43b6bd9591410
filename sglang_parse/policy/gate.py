"""Whether drafts are judged, followed token by token, or not made at all; pure.

The way that gives most tokens per millisecond is taken, with a margin for the one that
was taken before. Drafts that do not pay are tried now and then, so that it is noticed
when they get better. Trials may lose 1% of the time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from operator import mul

from sglang_parse.policy.acceptance import ENOUGH_SEGMENTS, Acceptance, Rate
from sglang_parse.policy.costs import CostModel
from sglang_parse.policy.window import Choice, Goodput
from sglang_parse.requests.round_records import RequestRound

# Tokens drafted for verdicts after which these are known well enough for another way to
# be taken.
ENOUGH_DRAFTED = 512
# Tokens of the draft model that were followed token by token, and rounds of a head,
# before the two are compared.
ENOUGH_REWRITTEN, ENOUGH_HEADED = 256, 16
# New draft tokens of all requests, about, until then and in trials; and of one of them.
TRIAL_TOKENS, TRIAL_STEPS = 1024, 64
# Share of the time that trials may lose, and the longest wait for one in milliseconds.
TRIAL_SHARE, LONGEST_WAIT_MS = 0.01, 300_000.0
# Rounds that wait for the time of a plain one at a new number of requests. Copies, and
# what clients have written, may be in each of them.
MOST_NEW = 8
# How much faster another way has to look before it is taken.
MARGIN = 1.05
# Milliseconds for which a choice is kept: a search takes half of one, and what a way
# costs at a new number of requests is known after some rounds.
KEPT_MS = 500.0


@dataclass(frozen=True)
class Situation:
    """What a choice is made for.

    most: new draft tokens that some request may have. suffix_len: rows of the pass per
    verdict. can_judge, can_follow: ways that are open. every: spacing of verdicts that
    is set, 0 to choose it. chain: tokens of a head that writes where drafts are
    followed, 0 without one.
    """

    bs: int
    most: int
    suffix_len: float = 0.0
    can_judge: bool = True
    can_follow: bool = True
    every: int = 0
    chain: int = 0


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


class Gate:
    """Learns what rounds cost and give, and chooses. The clock is `ms`, which the
    planner moves on by what each round took."""

    def __init__(self) -> None:
        self.costs = CostModel()
        self.accept = Acceptance()
        self.ms = 0.0
        #: The last choice, with what it expects on this rank; why it is not judged, or
        #: ""; what it was made for, and until when it is kept.
        self.chosen, self._reason = Choice(), ""
        self._now, self._kept_ms = Situation(0, 0), 0.0
        #: How well the head knows its tokens: those that stood, over what it expected.
        self.trust = Rate(1.0, weight=32)
        #: When the next trial is due.
        self._due_ms = 0.0
        #: What a trial is compared with, tokens per millisecond; 0 outside of one.
        self._instead = 0.0
        self._knows_verdicts, self._by_head, self._num_new = False, True, 0
        #: Whether drafts that are followed, and judged, were made of late.
        self._taken = {False: True, True: True}

    def choose(self, now: Situation) -> tuple[Choice, str]:
        """Of this round, and why it is not judged, or ""."""
        if self._now != now or self.ms >= self._kept_ms:
            self._now, self._kept_ms = now, self.ms + KEPT_MS
            self.chosen, self._reason = self._best(now)
        return self.chosen, self._reason

    @property
    def is_trial(self) -> bool:
        """Whether the last choice tries what did not pay. All its drafts are then in
        one pass, which shows what they give."""
        return bool(self._instead)

    def spend(self, ms: float, tokens: int, *, is_plain: bool) -> None:
        """A round took `ms` and gave these tokens; it may have been a trial."""
        self.ms += ms
        if self._instead:
            lost_ms = ms - tokens / self._instead
            due_ms = max(self._due_ms, self.ms) + lost_ms / TRIAL_SHARE
            self._due_ms = min(due_ms, self.ms + LONGEST_WAIT_MS)
            if not is_plain:
                self._instead, self._kept_ms = 0.0, 0.0

    def learn(self, r: RequestRound, *, judged: bool) -> None:
        """What became of a request's draft, before its state moves on."""
        self.accept.learn(r, judged=judged)
        num = r.decision.num_correct_drafts
        seen = r.chances[: min(r.kept.cut.exact_end or r.kept.cut.tail_end, num + 1)]
        self.trust.observe(sum(seen), min(num, len(seen)))

    def headed(self, bs: int, chain: int) -> Choice:
        """Token by token after a head, with chains of so many tokens."""
        ms = self.costs.head.ms(1, bs * (1 + chain), bs)
        rate = bs * (1 + self.accept.head.mean(chain)) / ms
        if not self.costs.head.is_known:
            rate = MARGIN * bs / self.costs.at(bs).plain  # to be tried
        return Choice(chain, judged=False, rate=rate)

    def asks_head(self, bs: int, chain: int) -> bool:
        """Whether this rank would have the head draft, where no other drafter does."""
        now = Situation(bs, chain, can_judge=False, chain=chain)
        return bool(self._best(now)[0].steps)

    def chain_rule(self, bs: int, chain: int) -> ChainRule | None:
        """What chains of a head are cut by, None to show them whole."""
        fit, plain_ms = self.costs.head, self.costs.at(bs).plain
        if not fit.is_known or self.is_trial:
            return None
        rate = max(bs / plain_ms, self.headed(bs, chain).rate)
        fixed = max(0.0, rate * (fit.ms(1, bs, bs) - plain_ms))
        return ChainRule(rate * float(fit.parts[1]), fixed, self.trust.value)

    def _best(self, now: Situation) -> tuple[Choice, str]:
        costs = self.costs.at(now.bs)
        plain = Choice(judged=now.can_judge, rate=now.bs / costs.plain)
        is_known = self.costs.is_known or (now.chain > 0 and self.costs.head.is_known)
        # The steps of a draft server are never seen, but its drafts are.
        is_judged = self.accept.boundary.num_seen >= ENOUGH_DRAFTED
        if is_judged and (is_known or self.costs.verify.is_known):
            self._knows_verdicts = True
        is_known = is_known or self._knows_verdicts
        knows = self._knows_verdicts or not now.can_judge
        is_new = is_known and knows and not self.costs.knows_plain(now.bs)
        self._num_new = self._num_new + 1 if is_new else 0
        if not now.most or 0 < self._num_new <= MOST_NEW:
            self._kept_ms = 0.0
            return plain, ""
        model = Goodput(costs, self.accept, now.suffix_len)
        single = followed = model.followed(now.most)
        if now.chain:
            followed = self.headed(now.bs, now.chain)
        if not now.can_judge:
            return self._weigh(followed, plain), ""
        others = (plain, followed) if now.can_follow else (plain,)
        other = max(others, key=lambda c: c.rate)
        if now.chain:
            single = model.followed(now.most, self.accept.rewritten)
        recovery = single.steps if single.rate > plain.rate else 0
        if now.chain:
            self._by_head = not recovery or self._head_recovers(followed, single)
        judged = model.judged(now.most, now.every, recovery)
        judged = replace(judged, by_head=self._by_head)
        if not knows:
            self._kept_ms = 0.0
            return self._short(judged), ""
        choice = self._weigh(judged, other)
        unit = costs.plain / now.bs
        reason = (
            f"verdicts do not pay here: {judged.rate * unit:.1f}x against "
            f"{other.rate * unit:.1f}x"
        )
        return choice, reason if choice is other else ""

    def _head_recovers(self, headed: Choice, drafted: Choice) -> bool:
        """Whether the head, and not the draft model, writes for requests that recover.
        Both are tried before they are compared, the draft model first."""
        if self.accept.rewritten.num_seen < ENOUGH_REWRITTEN:
            return False
        if self.costs.head.count < ENOUGH_HEADED:
            return True
        if self._by_head:
            return drafted.rate < MARGIN * headed.rate
        return headed.rate >= MARGIN * drafted.rate

    def _weigh(self, way: Choice, other: Choice) -> Choice:
        """This way to draft, or the best other one; a trial of it where one is due."""
        was_taken = self._taken[way.judged]
        pays = way.rate >= other.rate * (1.0 if was_taken else MARGIN)
        self._taken[way.judged] = pays
        waits = self.ms < self._due_ms and not self.is_trial
        if pays or not way.steps or waits:
            return way if pays else other
        self._instead = other.rate
        return self._short(way) if way.judged else way

    def _short(self, way: Choice) -> Choice:
        """A round that tells much and costs little: a few tokens of some requests, but
        drafts that hold boundaries, also where all answers have just begun."""
        steps = max(TRIAL_STEPS, round(ENOUGH_SEGMENTS * self.accept.segment_len))
        return replace(way, steps=steps, writers=max(1, TRIAL_TOKENS // steps))
