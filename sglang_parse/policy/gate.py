"""Whether drafts are judged, followed token by token, or not made at all; pure.

The way that gives most tokens per millisecond is taken, with a margin for the one that
was taken before. Drafts that do not pay are tried now and then, so that it is noticed
when they get better. Trials may lose 1% of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_parse.policy.acceptance import Acceptance, Rate
from sglang_parse.policy.costs import CostModel
from sglang_parse.policy.head_gate import ChainRule, HeadGate
from sglang_parse.policy.trial_budget import MARGIN, Trials
from sglang_parse.policy.window import Choice, Goodput
from sglang_parse.requests.round_records import RequestRound

# Judged tokens, failing verdicts, or drafted tokens without any verdict, after which
# verdicts are known well enough for another way to be taken.
ENOUGH_JUDGED, ENOUGH_FAILURES, ENOUGH_DRAFTED = 512, 6, 1024
# Until then, and in trials, a round is short where many requests run: new draft tokens
# of all requests together, and requests that draft. Drafts are as long as so many
# segments at least, as shorter ones show only the segments that are short.
TRIAL_TOKENS, TRIAL_WRITERS, TRIAL_SEGMENTS = 384, 32, 1.5
# Shares that earlier verdicts, and earlier agreement, count for once a trial begins.
VERDICTS_COUNT, AGREEMENT_COUNTS = 0.5, 0.7
# Rounds for which a choice is kept, since the search takes half a millisecond.
KEPT_ROUNDS = 4


@dataclass(frozen=True)
class Situation:
    """What a choice is made for.

    most: new draft tokens that some request may have. suffix_len: rows of the pass per
    verdict. can_judge, can_follow: ways that are open. every: spacing of verdicts that
    is set, 0 to choose it. has_head: whether a token-level drafter writes where drafts
    are followed.
    """

    bs: int
    most: int
    suffix_len: float
    can_judge: bool = True
    can_follow: bool = True
    every: int = 0
    has_head: bool = False


class Gate:
    """Learns what rounds cost and give, and chooses. The clock is `ms`, which the
    planner moves on by what each round took."""

    def __init__(self) -> None:
        self.costs = CostModel()
        self.accept = Acceptance()
        self.ms = 0.0
        #: The last choice, with what it expects on this rank.
        self.chosen = Choice()
        self.head = HeadGate()
        #: How well the head knows its tokens: those that stood, over what it expected.
        self.trust = Rate(1.0, weight=32, memory=512)
        self._trials = Trials()
        #: What a trial is compared with, tokens per millisecond, 0 outside of one; and
        #: milliseconds that it is expected to lose.
        self._instead, self._expected_ms = 0.0, 0.0
        self._knows_verdicts = False
        #: By number of requests and by whether drafts are judged: whether they were
        #: made of late.
        self._taken: dict[tuple[int, bool], bool] = {}
        #: What the last choice was made for, its reason, and rounds that it holds for.
        self._kept: tuple[Situation | None, str] = None, ""
        self._num_kept = 0

    def choose(self, now: Situation) -> tuple[Choice, str]:
        """Of this round, and why it is not judged, or ""."""
        self._num_kept -= 1
        if self._num_kept <= 0 or self._kept[0] != now:
            self.chosen, reason = self._best(now)
            is_known = self._is_enough(now) and self.costs.knows_plain(now.bs)
            self._kept, self._num_kept = (now, reason), KEPT_ROUNDS * is_known
        return self.chosen, self._kept[1]

    @property
    def is_trial(self) -> bool:
        """Whether the last choice tries what did not pay. All its drafts are then in
        one pass, which shows what they give."""
        return bool(self._instead)

    def spend(self, ms: float, tokens: int, *, is_plain: bool) -> None:
        """A round took `ms` and gave these tokens; it may have been a trial."""
        self.ms += ms
        if self._instead and not is_plain:
            lost_ms = max(self._expected_ms, ms - tokens / self._instead)
            self._trials.charge(self.ms, lost_ms)
            self._instead, self._num_kept = 0.0, 0

    def learn(self, r: RequestRound, *, judged: bool) -> None:
        """What became of a request's draft, before its state moves on."""
        self.accept.learn(r, judged=judged)
        num = r.decision.num_correct_drafts
        seen = r.chances[: min(r.kept.cut.exact_end or r.kept.cut.tail_end, num + 1)]
        self.trust.observe(sum(seen), min(num, len(seen)))

    def asks_head(self, bs: int, num_able: int) -> bool:
        """Whether this rank would have the head draft, where no other drafter does.
        num_able: requests that it can draft for."""
        rate = bs / self.costs.plain_ms(bs)
        is_known = self.costs.knows_plain(bs)
        return is_known and self.head.asks(bs, num_able, rate, self.ms)

    def chain_rule(self, bs: int) -> ChainRule | None:
        """What chains of a head are cut by, None to show them whole."""
        costs, head_rate = self.costs.at(bs), self.head.rate(bs)
        if not head_rate:
            return None
        rate = max(bs / self.costs.plain_ms(bs), head_rate)
        fixed = rate * (costs.verify.ms(bs) - self.costs.plain_ms(bs))
        return ChainRule(
            rate * costs.verify.slope_ms, max(0.0, fixed), self.trust.value
        )

    def _times_plain(self, now: Situation) -> bool:
        """Whether the next round is plain so that its time is known. The first requests
        are judged before that."""
        is_known = now.can_judge or self.costs.at(now.bs).is_known
        return is_known and self._is_enough(now) and not self.costs.knows_plain(now.bs)

    def _best(self, now: Situation) -> tuple[Choice, str]:
        plain_ms = self.costs.plain_ms(now.bs)
        plain = Choice(judged=now.can_judge, rate=now.bs / plain_ms)
        if not now.most or self._times_plain(now):
            return plain, ""
        costs = self.costs.nearest(now.bs)
        model = Goodput(now.bs, costs, self.accept, now.suffix_len)
        followed = plain
        if now.can_follow and now.has_head:
            followed = Choice(1, judged=False, rate=self.head.rate(now.bs))
        elif now.can_follow:
            followed = model.followed(now.most)
        if not now.can_judge:
            return self._weigh(now, followed, plain), ""
        other = max(plain, followed, key=lambda c: c.rate)
        judged = model.judged(now.most, every=now.every)
        if not self._is_enough(now):
            return self._short(now, judged), ""
        choice = self._weigh(now, judged, other)
        if choice is not other:
            return choice, ""
        unit = plain_ms / now.bs
        reason = (
            f"verdicts do not pay here: {judged.rate * unit:.1f}x against "
            f"{other.rate * unit:.1f}x"
        )
        return other, reason

    def _is_enough(self, now: Situation) -> bool:
        """Whether enough is known of verdicts. No drafts may have any, where segments
        are longer than drafts."""
        valid, boundary = self.accept.valid, self.accept.boundary
        self._knows_verdicts = (
            self._knows_verdicts
            or valid.num_seen >= ENOUGH_JUDGED
            or valid.num_ends >= ENOUGH_FAILURES
            or (boundary.num_seen >= ENOUGH_DRAFTED and boundary.num_ends < 4)
        )
        return self._knows_verdicts or not now.can_judge

    def _weigh(self, now: Situation, way: Choice, other: Choice) -> Choice:
        """This way to draft, or the best other one; a trial of it where one is due."""
        key = now.bs, way.judged
        was_taken = self._taken.get(key, True)
        margin = 1.0 if was_taken else MARGIN
        self._taken[key] = way.rate >= margin * other.rate
        if self._taken[key]:
            self._trials.won()
            return way
        if not way.steps:
            return other
        lost_ms = max(0.0, now.bs * way.ms * (1 - way.rate / other.rate))
        if was_taken:
            self._trials.charge(self.ms, lost_ms)
        if not self._trials.is_due(self.ms):
            return other
        self._instead, self._expected_ms = other.rate, lost_ms
        if way.judged:
            self.accept.valid.forget(VERDICTS_COUNT)
            self.accept.recovering.forget(VERDICTS_COUNT)
        else:
            self.accept.followed.forget(AGREEMENT_COUNTS)
        return self._short(now, way) if way.judged else way

    def _short(self, now: Situation, way: Choice) -> Choice:
        """A round that tells much and costs little: a few tokens of some requests."""
        segments = round(TRIAL_SEGMENTS * self.accept.segment_len)
        most = max(TRIAL_TOKENS // now.bs, segments)
        return replace(way, steps=min(way.steps, most), writers=TRIAL_WRITERS)
