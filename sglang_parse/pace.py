"""Whether a round drafts, for how long, and how its drafts are verified.

From measured costs per batch size. A bound on the round's time keeps a new request's
first token from waiting for a long draft. A draft is made only where it gives more
tokens per millisecond than plain decoding. Verdicts, too, are asked for only where they
pay: a judge suffix costs rows of the pass, and where rows are dear (a large batch)
following the same draft token by token can give more.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, field

from sglang_parse.window import MIN_WINDOW, SHORT_WINDOW

# Rounds without drafting after speculation was seen not to pay; doubles each time, and
# from the second on is so long that the probe before it cost this share of the time.
FIRST_PAUSE = 8
MAX_PAUSE = 256
PROBE_COST = 0.04
# One probe that something else held up must not switch drafting off for good.
LONGEST_PAUSE = 1024
# Drafting rounds after which one plain round is measured to compare with, and the
# tokens per request and round below which it is measured at once.
PLAIN_CHECK_AFTER = 8
SUSPECT_TOKENS = 3.0
SMOOTHING = 0.25
# A first round that took so many times what the second took was held up, by a kernel's
# first use as a rule: it bounds no more rounds.
FIRST_USE = 4.0
# Easy and hard parts of a response take turns: what drafting gives is averaged longer.
SLOW_SMOOTHING = 0.1
# The other way to verify (by verdicts, token by token) is tried once this way has been
# seen for as long: requests times rounds of a trial, its least and most rounds. The
# wait for the next trial, in rounds, doubles with each that is lost; the share of the
# time that trials may cost; how much better the other way must be to be taken.
FIRST_WAIT = 16
TRIAL_SAMPLES = 64
TRIAL_ROUNDS = (6, 16)
TRIAL_COST = 0.01
MAX_WAIT = 1024
# (rounds, share) after which a trial is lost already: it gives less than this share of
# what the present way, or plain decoding, gives.
EARLY_LOSSES = ((2, 0.5), (4, 0.85))
TRIAL_MARGIN = 1.1
# The bound on a round's time is divided by 1 + (requests - 1) / this, running and
# waiting ones: the more there are, the sooner somebody arrives, and long rounds no
# longer pay more than short ones.
LOAD_SCALE = 5


@dataclass(frozen=True)
class RoundTiming:
    """One measured round. num_steps: draft steps. num_emitted: tokens of all
    requests. Milliseconds of the draft loop and of everything after it. segment_len:
    mean length of the segments, judged each or not, 0 if there were none. judged:
    whether verdicts were asked for; else the draft was followed token by token.
    num_rows, pass_ms: of a pass with judge suffixes, its verdicts read; 0 without any.
    """

    bs: int
    num_steps: int
    num_emitted: int
    draft_ms: float
    verify_ms: float
    segment_len: float = 0.0
    judged: bool = True
    num_rows: int = 0
    pass_ms: float = 0.0


@dataclass(frozen=True)
class RoundLimits:
    """steps: draft steps a round may take, 0 for a plain round. judged: whether to ask
    for verdicts; else the draft is followed token by token."""

    steps: int
    judged: bool


@dataclass
class _Average:
    """Exponential average, of the first values their mean; None before the first."""

    smoothing: float = SMOOTHING
    value: float | None = None
    count: int = 0

    def add(self, value: float) -> None:
        self.count += 1
        old = self.value or 0.0
        self.value = old + max(self.smoothing, 1 / self.count) * (value - old)


@dataclass
class _Way:
    """What drafting rounds verified in one way cost and gave, averaged.

    step_ms: what one more draft step adds to a round, its rows of the verify pass
    included. round_ms: of a round; tokens: those it gave each request.
    """

    step_ms: _Average = field(default_factory=_Average)
    round_ms: _Average = field(default_factory=lambda: _Average(SLOW_SMOOTHING))
    tokens: _Average = field(default_factory=lambda: _Average(SLOW_SMOOTHING))

    @property
    def rate(self) -> float | None:
        """Tokens per millisecond and request, None before the first round."""
        if self.tokens.value is None or self.round_ms.value is None:
            return None
        return self.tokens.value / self.round_ms.value

    def forget(self) -> None:
        """Leave what it gave to the rounds to come; its costs stay known."""
        self.round_ms, self.tokens = _Average(SLOW_SMOOTHING), _Average(SLOW_SMOOTHING)


@dataclass
class _Bucket:
    """Costs at one batch size, rounded to a power of two, in milliseconds.

    ways: of verifying, token by token and by verdicts. plain_ms: a round without
    drafting. judged: the way taken now; trial_rounds: how long the other is tried;
    until_trial: rounds before that; trial_left: rounds of a trial still to come.
    """

    trial_rounds: int
    ways: tuple[_Way, _Way] = field(default_factory=lambda: (_Way(), _Way()))
    plain_ms: _Average = field(default_factory=_Average)
    num_spec: int = 0
    pause: int = 0
    next_pause: int = FIRST_PAUSE
    probing: bool = False
    judged: bool = True
    until_trial: int = 0
    next_wait: int = FIRST_WAIT
    trial_left: int | None = None

    def __post_init__(self) -> None:
        self.until_trial = self.trial_rounds

    def choose_way(self) -> bool:
        """Whether this round is judged; the other way is tried now and then."""
        if self.trial_left == 0 or self._is_lost():
            self._conclude_trial()
        if self.trial_left is None:
            self.until_trial -= 1
            if self.until_trial >= 0:
                return self.judged
            self.trial_left = self.trial_rounds
            self.ways[not self.judged].forget()
        self.trial_left -= 1
        return not self.judged

    def _is_lost(self) -> bool:
        if self.trial_left is None:
            return False
        now, other = self.ways[self.judged], self.ways[not self.judged]
        plain = 1 / self.plain_ms.value if self.plain_ms.value else 0.0
        best = max(now.rate or 0.0, plain)
        return other.rate is not None and any(
            other.tokens.count >= rounds and other.rate < share * best
            for rounds, share in EARLY_LOSSES
        )

    def _conclude_trial(self) -> None:
        """Take the other way if it was clearly better; else wait the longer for the
        next trial, the more this one cost."""
        self.trial_left = None
        now, other = self.ways[self.judged], self.ways[not self.judged]
        if now.rate is None or other.rate is None:
            self.until_trial = self.next_wait
        elif other.rate > TRIAL_MARGIN * now.rate:
            self.judged = not self.judged
            self.until_trial = self.next_wait = FIRST_WAIT
        else:
            lost = other.tokens.count * (1 - other.rate / now.rate)
            share = lost * (other.round_ms.value or 0.0) / (now.round_ms.value or 1.0)
            self.next_wait = min(2 * self.next_wait, MAX_WAIT)
            self.until_trial = max(self.next_wait, math.ceil(share / TRIAL_COST))


class RoundController:
    """Decides, round by round, whether to draft, how many steps at most, and how the
    draft is verified.

    max_round_ms: bound on a round's time, less of it under load; 0 for none. Decisions
    follow measured times, so they differ between runs; the exact mode's tokens do not.
    """

    def __init__(self, max_round_ms: int) -> None:
        self.max_round_ms = max_round_ms
        self._buckets: dict[int, _Bucket] = {}
        self._segment_len = _Average()

    def limits(
        self, bs: int, *, ways: Collection[bool], num_waiting: int = 0
    ) -> RoundLimits:
        """Of this round; call it once a round. ways: how its drafts may be verified,
        True for verdicts, False for token by token; at least one. num_waiting: requests
        that are not admitted yet."""
        bucket = self._bucket(bs)
        if bucket.pause:
            bucket.pause -= 1
            bucket.probing = bucket.pause == 0
            return RoundLimits(0, True in ways)
        judged = bucket.choose_way() if len(ways) > 1 else True in ways
        way = bucket.ways[judged]
        in_trial = len(ways) > 1 and judged != bucket.judged
        if not in_trial and not _pays(bucket, way):
            if bucket.ways[not judged].rate is None:
                bucket.until_trial = 0  # perhaps the other way pays
            return RoundLimits(0, judged)
        if bucket.probing:
            # A probe that reaches no boundary tells nothing of what a verdict keeps.
            least = round(2 * self.segment_len)
            return RoundLimits(max(SHORT_WINDOW, least), judged)
        step_ms = self._step_ms(bs, way)
        if not self.max_round_ms or not step_ms:
            return RoundLimits(1 << 30, judged)
        load = bs + num_waiting
        bound_ms = self.max_round_ms / (1 + (load - 1) / LOAD_SCALE)
        left_ms = bound_ms - (bucket.plain_ms.value or 0.0)
        least = self.least_window(judged=judged)
        return RoundLimits(max(least, int(left_ms / step_ms)), judged)

    def _step_ms(self, bs: int, way: _Way) -> float | None:
        """Of this way, else of the other, else of the nearest batch size that knows:
        better than a round without a bound."""
        near = sorted(self._buckets, key=lambda key: abs(key - _key(bs)))
        known = [way, *(w for key in near for w in self._buckets[key].ways)]
        return next((w.step_ms.value for w in known if w.step_ms.value), None)

    @property
    def segment_len(self) -> float:
        """Mean tokens of a segment, 0 before the first."""
        return self._segment_len.value or 0.0

    def least_window(self, *, judged: bool) -> int:
        """A draft that reaches no boundary cannot be judged, so it is worth little."""
        if not judged:
            return MIN_WINDOW
        return max(MIN_WINDOW, round(1.5 * self.segment_len))

    def observe(self, timing: RoundTiming) -> None:
        """Learn from a finished round."""
        bucket = self._bucket(timing.bs)
        if timing.num_steps == 0:
            bucket.plain_ms.add(timing.verify_ms)
            return
        bucket.probing = False
        bucket.num_spec += 1
        round_ms = timing.draft_ms + timing.verify_ms
        base_ms = min(bucket.plain_ms.value or 0.0, timing.verify_ms)
        way = bucket.ways[timing.judged]
        step_ms = (round_ms - base_ms) / timing.num_steps
        if way.step_ms.count == 1 and (way.step_ms.value or 0.0) > FIRST_USE * step_ms:
            way.step_ms = _Average()
        way.step_ms.add(step_ms)
        way.round_ms.add(round_ms)
        way.tokens.add(timing.num_emitted / timing.bs)
        if timing.segment_len:
            self._segment_len.add(timing.segment_len)

    def _bucket(self, bs: int) -> _Bucket:
        key = _key(bs)
        if key not in self._buckets:
            least, most = TRIAL_ROUNDS
            trial_rounds = min(max(least, TRIAL_SAMPLES >> key), most)
            # Where drafting did not pay at another batch size, begin with a probe.
            distrusted = any(b.next_pause > FIRST_PAUSE for b in self._buckets.values())
            nearest = min(self._buckets, key=lambda k: abs(k - key), default=None)
            judged = nearest is None or self._buckets[nearest].judged
            bucket = _Bucket(trial_rounds, probing=distrusted, judged=judged)
            self._buckets[key] = bucket
        return self._buckets[key]


def _key(bs: int) -> int:
    return round(math.log2(bs))


def _pays(bucket: _Bucket, way: _Way) -> bool:
    """Whether drafting yields more tokens per millisecond than plain decoding; else
    the pause before the next probe begins."""
    if bucket.probing:
        # Judge by the probe to come, not by what led to the pause.
        way.forget()
        return True
    tokens, round_ms = way.tokens.value, way.round_ms.value
    plain_ms = bucket.plain_ms.value
    if tokens is None or round_ms is None:
        return True
    if plain_ms is None:
        return tokens >= SUSPECT_TOKENS and bucket.num_spec < PLAIN_CHECK_AFTER
    if tokens / round_ms >= 1 / plain_ms:
        bucket.next_pause = FIRST_PAUSE
        return True
    lost_ms = round_ms - tokens * plain_ms
    least = math.ceil(lost_ms / (PROBE_COST * plain_ms))
    if bucket.next_pause == FIRST_PAUSE:
        least = 0  # a kernel's first use, or a neighbour, may have held the round up
    bucket.pause = min(max(bucket.next_pause, least), LONGEST_PAUSE) - 1
    bucket.next_pause = min(2 * bucket.next_pause, MAX_PAUSE)
    return False
