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
# of a request at least, of all requests together, and requests that draft.
TRIAL_STEPS, TRIAL_TOKENS, TRIAL_WRITERS = 32, 384, 32
# They are as long as so many segments, and new draft tokens at most: shorter drafts
# show only the segments that are short.
TRIAL_SEGMENTS, MOST_TRIAL_STEPS = 1.5, 96
# Share that earlier drafts count for once a trial begins.
TRIAL_FORGETS = 0.7
# Rounds for which a choice is kept, or draft steps if these are fewer rounds, once so
# many requests of rounds have been counted.
KEPT_ROUNDS, KEPT_STEPS, SEEN_ROUNDS = 16, 256, 64
# One round of a head in so many shows its chains whole, so that it is noticed when they
# get better.
WHOLE_CHAINS = 64


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
        self._num_requests = 0
        self._knows_verdicts = False
        #: By number of requests: whether drafts were judged, and followed, of late.
        self._judged: dict[int, bool] = {}
        self._followed: dict[int, bool] = {}
        #: The last situation, its choice with the reason, and rounds that it holds for.
        self._kept: tuple[Situation, tuple[Choice, str]] | None = None
        self._num_kept = 0

    def choose(self, now: Situation) -> tuple[Choice, str]:
        """Of this round, and why it is not judged, or ""."""
        if self._kept is None or self._kept[0] != now or not self._num_kept:
            self._kept = now, self._best(now)
            is_kept = self._num_requests > SEEN_ROUNDS and not self._times_plain(now)
            most = KEPT_STEPS // max(1, self._kept[1][0].steps)
            self._num_kept = max(1, min(KEPT_ROUNDS, most)) if is_kept else 1
        self._num_kept -= 1
        self._num_requests += now.bs
        choice, reason = self._kept[1]
        self.chosen = choice
        return choice, reason

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
            self._instead, self._kept = 0.0, None

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
        if not head_rate or self.head.num_rounds(bs) % WHOLE_CHAINS == 0:
            return None
        rate = max(bs / self.costs.plain_ms(bs), head_rate)
        fixed = rate * (costs.verify.ms(bs) - self.costs.plain_ms(bs))
        return ChainRule(
            rate * costs.verify.slope_ms, max(0.0, fixed), self.trust.value
        )

    def _times_plain(self, now: Situation) -> bool:
        """Whether the next round is plain so that its time is known. The first requests
        are judged before that."""
        if self.costs.knows_plain(now.bs):
            return False
        if now.can_judge:
            return self._num_requests > SEEN_ROUNDS
        return self.costs.at(now.bs).is_known

    def _best(self, now: Situation) -> tuple[Choice, str]:
        plain_ms = self.costs.plain_ms(now.bs)
        plain = Choice(judged=now.can_judge, rate=now.bs / plain_ms)
        if not now.most or self._times_plain(now):
            return plain, ""
        model = Goodput(
            now.bs,
            self.costs.nearest(now.bs),
            self.accept,
            now.suffix_len,
            plain_ms,
        )
        followed = plain
        if now.can_follow and now.has_head:
            followed = Choice(1, judged=False, rate=self.head.rate(now.bs))
        elif now.can_follow:
            followed = model.followed(now.most)
        if not now.can_judge:
            return self._weigh(now, followed, plain, self._followed), ""
        other = max(plain, followed, key=lambda c: c.rate)
        judged = model.judged(now.most, every=now.every)
        if not self._is_enough():
            return self._short(now, judged), ""
        choice = self._weigh(now, judged, other, self._judged)
        if choice is not other:
            return choice, ""
        unit = plain_ms / now.bs
        reason = (
            f"verdicts do not pay here: {judged.rate * unit:.1f}x against "
            f"{other.rate * unit:.1f}x"
        )
        return other, reason

    def _is_enough(self) -> bool:
        """Whether enough is known of verdicts. No drafts may have any, where segments
        are longer than drafts."""
        valid, boundary = self.accept.valid, self.accept.boundary
        self._knows_verdicts = (
            self._knows_verdicts
            or valid.num_seen >= ENOUGH_JUDGED
            or valid.num_ends >= ENOUGH_FAILURES
            or (boundary.num_seen >= ENOUGH_DRAFTED and boundary.num_ends < 4)
        )
        return self._knows_verdicts

    def _weigh(
        self, now: Situation, way: Choice, other: Choice, taken: dict[int, bool]
    ) -> Choice:
        """This way to draft, or the best other one; a trial of it where one is due."""
        was_taken = taken.get(now.bs, True)
        margin = 1.0 if was_taken else 1 / MARGIN
        taken[now.bs] = way.rate * margin >= other.rate
        if taken[now.bs]:
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
        rate = self.accept.valid if way.judged else self.accept.followed
        rate.forget(TRIAL_FORGETS)
        return self._short(now, way) if way.judged else way

    def _short(self, now: Situation, way: Choice) -> Choice:
        """A round that tells much and costs little: a few tokens of some requests."""
        segments = min(MOST_TRIAL_STEPS, TRIAL_SEGMENTS * self.accept.segment_len)
        least = max(TRIAL_STEPS, TRIAL_TOKENS // now.bs, round(segments))
        return replace(way, steps=min(way.steps, least), writers=TRIAL_WRITERS)
