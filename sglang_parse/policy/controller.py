"""Chooses how the next rounds are run: what gives most tokens a millisecond; pure.

Costs and drafts are learnt from rounds (`RoundPlanner.observe`), and goodput.py says
what each way of running rounds would give. A way that is not taken is tried now and
then, so that it is noticed when drafts get better: as rarely as keeps what trials lose
to a share of the time.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from sglang_parse.policy.chains import ChainRule, Confidence
from sglang_parse.policy.goodput import ENOUGH_ASKED, Choice, Drafts, Goodput
from sglang_parse.policy.rest import TRIAL_COST, Pays, Tried
from sglang_parse.policy.round_costs import CostModel

# Rounds for which a choice is kept, once so many have been seen. A plain round is timed
# once as many were, each counted for every request in it.
KEPT_ROUNDS, SEEN_ROUNDS = 4, 64
# Milliseconds from one trial to the next at most; and the same after a trial that lost
# more than its share of a minute.
LONGEST_WAIT_MS, LONGEST_REST_MS = 60_000.0, 300_000.0
# The wait doubles with each trial that is lost, up to so many times what it was.
MOST_LONGER = 8
# How much better another way has to look to be taken.
MARGIN = 1.05
# The same of a drafter of single tokens: awake, it also reads prompts, which no round
# shows.
HEAD_MARGIN = 1.03
# Judged tokens, and failing verdicts, after which verdicts are known well enough for
# another way to be taken. So drafts are judged from the first request on.
ENOUGH = (512, 4)
# Drafted tokens after which that is known too, if so few segments ended in them: there
# is no verdict on a draft without an end.
ENOUGH_DRAFTED, FEW_ENDS = 1024, 4
# New draft tokens of a request until then: at least, and of all requests together. The
# same in a trial.
FIRST_STEPS, TRIAL_STEPS = (32, 256), (32, 512)
# Requests that draft in both: more of them tell little more, and each has to be read.
WRITERS = 32
# Failing verdicts that the first wait for a trial is as long for as for half of many: a
# few may be bad luck.
LUCK = 8.0
# One round in so many shows chains whole, so that it is noticed when they get better.
WHOLE_CHAINS = 64
# What drafts were like before a trial counts for this share in it; and tokens of drafts
# that were followed which count in full, lest little but the prior is left.
FORGET, WELL_KNOWN = 0.7, 64


@dataclass(frozen=True)
class Asked:
    """What a choice is made for.

    most: new draft tokens that some request may have. suffix_len: rows of the pass that
    a verdict takes on average. can_judge, can_follow: the ways
    to verify that are open. every: distance of verdicts that is set, 0 to choose it.
    most_ms: bound on the round's time, 0 without one. head: tokens that a drafter of
    single tokens writes where drafts are followed, 0 without one.
    """

    bs: int
    most: int
    suffix_len: float
    can_judge: bool = True
    can_follow: bool = True
    every: int = 0
    most_ms: float = 0.0
    head: int = 0


@dataclass
class _Kept:
    """A choice, and for how many rounds more it holds."""

    asked: Asked
    choice: Choice
    rounds: int
    reason: str


class Controller:
    """Learns what rounds cost and give, and chooses."""

    def __init__(self, *, runs_ahead: bool = False) -> None:
        """runs_ahead: whether a decode step may run while the scheduler works."""
        self.costs = CostModel(runs_ahead=runs_ahead)
        self.drafts = Drafts()
        self.confidence = Confidence()
        #: The last choice, with what it expects on this rank.
        self.chosen = Choice()
        self.ms = 0.0
        self._next_head_trial_ms = 0.0
        self._num_rounds = 0
        #: The same, counted once for each request of a round.
        self._num_requests = 0
        self._wait_longer = 1
        self._knows_verdicts = False
        #: When the next trial of drafting by verdicts is due, while they are not asked.
        self._next_trial_ms = 0.0
        #: Whether the next one has waited since its drafts could not have paid.
        self._has_rested = False
        #: Tokens a millisecond that a trial gives up, 0 outside of one, and the
        #: milliseconds that it is expected to lose.
        self._trial_rate = 0.0
        self._trial_loss_ms = 0.0
        self._trial_judged = False
        self._kept: _Kept | None = None
        #: By number of requests: whether drafts were judged, and followed, of late.
        self._judged: dict[int, bool] = {}
        self._follows: dict[int, bool] = {}

    def choose(self, asked: Asked) -> tuple[Choice, str]:
        """Of this round, and why it is not judged, or ""."""
        kept = self._kept
        if kept is None or kept.asked != asked or kept.rounds == 0:
            choice, reason = self._best(asked)
            is_measured = bool(asked.most) and self._measures_plain(asked)
            is_kept = self._num_rounds > SEEN_ROUNDS and not is_measured
            rounds = KEPT_ROUNDS if is_kept else 1
            kept = self._kept = _Kept(asked, choice, rounds, reason)
        kept.rounds -= 1
        self.chosen = kept.choice
        self._num_rounds += 1
        self._num_requests += asked.bs
        return kept.choice, kept.reason

    def head_pays(self, bs: int, steps: int, tried: Tried | None = None) -> Pays:
        """Whether a drafter of single tokens is faster than plain rounds; tried now and
        then where it is not. Nobody else drafts. tried: of a trial that goes on."""
        costs = self.costs.at(bs)
        if costs.token_draft.count < 2 or costs.plain.count < 2:
            # Its second round is the first that counts; so is the second plain one.
            return Pays.TRIAL if costs.token_draft.count < 2 else Pays.NO
        lost_ms = self._lost_by_head(bs, steps)
        if lost_ms <= 0:
            return Pays.YES
        if tried is not None and tried.is_lost:
            return Pays.LOST
        if tried is not None or self.ms >= self._next_head_trial_ms:
            self._next_head_trial_ms = self.ms + lost_ms / TRIAL_COST
            return Pays.TRIAL
        return Pays.NO

    def head_would_pay(self, bs: int, steps: int) -> bool:
        """Whether it paid when rounds of this size last asked it."""
        if self.costs.at(bs).asked.count < ENOUGH_ASKED:
            return False
        return self._lost_by_head(bs, steps) <= 0

    def _lost_by_head(self, bs: int, steps: int) -> float:
        """Milliseconds that a round loses by asking it; less than 0 where it gains."""
        plain_ms = self.costs.plain_ms(bs)
        model = Goodput(bs, self.costs.at(bs), self.drafts, 0, plain_ms)
        choice = model.token_level(steps)
        return choice.round_ms * (HEAD_MARGIN - choice.rate * plain_ms / bs)

    def chain_rule(self, bs: int) -> ChainRule | None:
        """What chains of single tokens are cut by, None to show them whole."""
        costs, plain_ms = self.costs.at(bs), self.costs.plain_ms(bs)
        rounds = costs.asked.count
        known = costs.is_followed and self.confidence.is_known and plain_ms
        if not known or rounds % WHOLE_CHAINS == 0:
            return None
        rate = max(bs / plain_ms, costs.asked.x / costs.asked.ms)
        first_ms, agreement = costs.plain_ms(1), self.drafts.token_level
        return ChainRule(bs, costs, first_ms, rate, self.confidence, agreement)

    def spend(self, ms: float) -> None:
        """So much time went by in a round."""
        self.ms += ms

    def conclude_trial(self, tokens: int, ms: float, reading_ms: float) -> None:
        """What a trial gave; the next one waits the longer, the more it lost. One
        round may gain by luck: what it was expected to lose counts at least.

        reading_ms: of `ms`, the time that the draft model read prompts in.
        """
        if not self._trial_rate:
            return
        lost_ms = ms - reading_ms - tokens / self._trial_rate
        if lost_ms < 0:
            self._wait_longer = 1
        lost_ms = max(self._trial_loss_ms, lost_ms)
        # In drafts that are followed, nobody would have read.
        self._wait(lost_ms if self._trial_judged else lost_ms + reading_ms)
        self._trial_rate = 0.0
        self._kept = None

    def _wait(self, lost_ms: float) -> None:
        """A trial loses so much: how long to wait for the next one, and no shorter than
        another number of requests has to."""
        least_ms = min(lost_ms / TRIAL_COST, LONGEST_REST_MS)
        wait_ms = max(least_ms, min(least_ms * self._wait_longer, LONGEST_WAIT_MS))
        self._wait_longer = min(2 * self._wait_longer, MOST_LONGER)
        self._next_trial_ms = max(self._next_trial_ms, self.ms + wait_ms)

    def _measures_plain(self, asked: Asked) -> bool:
        """Whether the next round is plain so that its time is known: a pass may take
        far longer, and says little of it. First requests are judged before that."""
        if self.costs.at(asked.bs).plain.count >= 2:
            return False
        if asked.can_judge:
            return self._num_requests > SEEN_ROUNDS
        return self.costs.at(asked.bs).is_known

    # -- The choice ------------------------------------------------------------

    def _best(self, asked: Asked) -> tuple[Choice, str]:
        plain_ms = self.costs.plain_ms(asked.bs)
        model = Goodput(
            asked.bs,
            self.costs.nearest(asked.bs),
            self.drafts,
            asked.suffix_len,
            self.costs.plain_ms(asked.bs, 1),
        )
        plain = Choice(judged=asked.can_judge, rate=asked.bs / plain_ms)
        if not asked.most or self._measures_plain(asked):
            return plain, ""
        followed = plain
        if asked.can_follow:
            by_head = model.token_level(asked.head) if asked.head else None
            followed = by_head or model.followed(asked.most)
        other = max(plain, followed, key=lambda c: c.rate)
        if not asked.can_judge:
            at_best = followed
            if not asked.head:
                at_best = model.followed(asked.most, at_best=True)
            return self._follow(asked.bs, followed, plain, at_best), ""
        judged = model.judged(asked.most, every=asked.every, most_ms=asked.most_ms)
        return self._weigh(asked, judged, other)

    def _begin_trial(self, instead: Choice, lost_ms: float, *, judged: bool) -> None:
        self._trial_rate, self._trial_loss_ms = instead.rate, lost_ms
        self._trial_judged = judged

    def _follow(
        self, bs: int, followed: Choice, plain: Choice, at_best: Choice
    ) -> Choice:
        """Drafts that are followed token by token, or none; a trial where it is due.

        at_best: if the target agreed with all of them. Where that would not pay either,
        only times could change it, which seldom change: a trial waits for longer.
        """
        margin = 1.0 if self._follows.get(bs, True) else 1 / MARGIN
        self._follows[bs] = followed.rate * margin > plain.rate
        if self._follows[bs]:
            self._wait_longer = 1
            return followed
        if followed.steps and self.ms >= self._next_trial_ms:
            could_pay = at_best.rate >= MARGIN * plain.rate
            self._has_rested = not (could_pay or self._has_rested)
            if self._has_rested:
                self._next_trial_ms = self.ms + LONGEST_REST_MS
                return plain
            lost_ms = max(0.0, followed.round_ms * (1 - followed.rate / plain.rate))
            self._begin_trial(plain, lost_ms, judged=False)
            if self.drafts.followed.num_seen > WELL_KNOWN:
                self.drafts.followed.forget(FORGET)
            return followed
        return plain

    def _weigh(self, asked: Asked, judged: Choice, other: Choice) -> tuple[Choice, str]:
        """Verdicts, or the best without them; a trial where one is due."""
        was_judged = self._judged.get(asked.bs, True)
        margin = 1.0 if was_judged else 1 / MARGIN
        tokens, failures = ENOUGH
        valid = self.drafts.valid
        if valid.num_seen >= tokens or valid.num_ends >= failures:
            self._knows_verdicts = True
        segments = self.drafts.segments
        if segments.num_seen >= ENOUGH_DRAFTED and segments.num_ends < FEW_ENDS:
            self._knows_verdicts = True
        if not self._knows_verdicts:
            return short(asked, judged, FIRST_STEPS), ""
        if judged.rate * margin >= other.rate:
            self._judged[asked.bs] = True
            self._wait_longer = 1
            return judged, ""
        lost_ms = judged.round_ms * (1 - judged.rate / other.rate)
        if was_judged:
            self._judged[asked.bs] = False
            self._wait(lost_ms * valid.num_ends / (valid.num_ends + LUCK))
        if self.ms >= self._next_trial_ms:
            self._begin_trial(other, lost_ms, judged=True)
            valid.forget(FORGET)
            return short(asked, judged, TRIAL_STEPS), ""
        unit = self.costs.plain_ms(asked.bs) / asked.bs
        reason = (
            f"verdicts do not pay here: {judged.rate * unit:.1f}x against "
            f"{other.rate * unit:.1f}x"
        )
        return other, reason


def short(asked: Asked, judged: Choice, steps: tuple[int, int]) -> Choice:
    """While little is known of verdicts a bad guess must cost little: many requests
    tell as much in a short round."""
    least, of_all = steps
    num = min(judged.steps, max(least, of_all // asked.bs))
    return replace(judged, steps=num, writers=WRITERS)
