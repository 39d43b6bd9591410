"""How many tokens each request drafts in a round.

Four limits, the smallest wins: the request's own window, which shrinks after a
rejection and grows back; a bound on the round's time, so that a new request's first
token does not wait for a long draft; whether speculation pays at all at this batch
size; and the free KV slots.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

MIN_WINDOW = 8
GROWTH = 2
# Longest draft of a round that also holds requests decoding token by token: they get
# one token a round, so the round must be short. Also the least length of a probe.
SHORT_WINDOW = 16
# Rounds without drafting after speculation was seen not to pay; doubles each time, and
# is at least so long that the probe before it cost this share of the time.
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
# The bound on a round's time is divided by 1 + (running requests - 1) / this: the more
# run, the sooner somebody arrives, and long rounds no longer pay more than short ones.
LOAD_SCALE = 5


def draft_window(asked: int, *, num_remaining: int, num_positions: int) -> int:
    """Draft tokens a request may hold; the bonus token takes the last output place.

    asked: the window setting, 0 for the whole response. num_remaining: output tokens
    left. num_positions: positions left for draft tokens and a suffix behind them.
    """
    return max(0, min(asked or num_remaining, num_remaining - 1, num_positions))


def first_window(mode: str) -> int:
    """A new request's window, 0 for unlimited: agreement token by token ends early,
    agreement in meaning does not."""
    return SHORT_WINDOW if mode == "exact" else 0


def next_window(
    window: int, *, num_draft: int, num_correct: int, rejected_len: int
) -> int:
    """A request's window after a round; 0 means unlimited, before and after.

    num_draft: draft tokens it held; num_correct: those kept. rejected_len: length of
    the first rejected segment, 0 if no verdict failed. A rejected request is in
    trouble: it drafts little more than the segment it failed at, and grows back as
    its drafts are kept.
    """
    if num_draft == 0:
        return window
    if num_correct >= num_draft:
        return window * GROWTH if window else 0
    if rejected_len:
        return max(MIN_WINDOW, rejected_len + rejected_len // 2)
    return max(MIN_WINDOW, 2 * num_correct)


def fit_windows(
    windows: Sequence[int], *, seq_lens: Sequence[int], held: Sequence[int], room: int
) -> list[int]:
    """Shrink windows until their slots fit the pool, the longest first.

    held: slots each row has already. room: free slots, of which a quarter is left
    for judge suffixes.
    """
    room = room * 3 // 4

    def num_missing(cap: int) -> int:
        return sum(
            max(0, n + 1 + min(w, cap) - h)
            for w, n, h in zip(windows, seq_lens, held, strict=True)
        )

    low, high = 0, max(windows, default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if num_missing(middle) <= room:
            low = middle
        else:
            high = middle - 1
    return [min(w, low) for w in windows]


@dataclass(frozen=True)
class RoundTiming:
    """One measured round. num_steps: draft steps. num_emitted: tokens of all
    requests. Milliseconds of the draft loop and of everything after it. segment_len:
    mean length of the segments judged, 0 if there were none."""

    bs: int
    num_steps: int
    num_emitted: int
    draft_ms: float
    verify_ms: float
    segment_len: float = 0.0


@dataclass
class _Average:
    """Exponential average; None before the first value."""

    value: float | None = None

    def add(self, value: float) -> None:
        if self.value is None:
            self.value = value
        else:
            self.value += SMOOTHING * (value - self.value)


@dataclass
class _Bucket:
    """Costs at one batch size (rounded to a power of two), in milliseconds.

    step_ms: what one more draft step adds to a round, its rows of the verify pass
    included. plain_ms: a round without drafting. spec_ms, spec_tokens: a drafting
    round and the tokens it gave each request.
    """

    step_ms: _Average = field(default_factory=_Average)
    plain_ms: _Average = field(default_factory=_Average)
    spec_ms: _Average = field(default_factory=_Average)
    spec_tokens: _Average = field(default_factory=_Average)
    num_spec: int = 0
    pause: int = 0
    next_pause: int = FIRST_PAUSE
    probing: bool = False


class WindowController:
    """Decides, round by round, whether to draft and how many steps at most.

    max_round_ms: bound on a round's time, less of it under load; 0 for none. Decisions
    follow measured times, so they differ between runs; the exact mode's tokens do not.
    """

    def __init__(self, max_round_ms: int) -> None:
        self.max_round_ms = max_round_ms
        self._buckets: dict[int, _Bucket] = {}
        self._segment_len = _Average()

    def step_cap(self, bs: int) -> int:
        """Draft steps allowed this round; 0 is a plain round. Call once a round."""
        bucket = self._bucket(bs)
        if not _pays(bucket):
            return 0
        if bucket.probing:
            # A probe that reaches no boundary tells nothing of what a verdict keeps.
            return max(SHORT_WINDOW, round(2 * (self._segment_len.value or 0.0)))
        step_ms = bucket.step_ms.value
        if not self.max_round_ms or not step_ms:
            return 1 << 30
        bound_ms = self.max_round_ms / (1 + (bs - 1) / LOAD_SCALE)
        left_ms = bound_ms - (bucket.plain_ms.value or 0.0)
        return max(MIN_WINDOW, int(left_ms / step_ms))

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
        bucket.step_ms.add((round_ms - base_ms) / timing.num_steps)
        bucket.spec_ms.add(round_ms)
        bucket.spec_tokens.add(timing.num_emitted / timing.bs)
        if timing.segment_len:
            self._segment_len.add(timing.segment_len)

    def _bucket(self, bs: int) -> _Bucket:
        key = bs.bit_length()
        if key not in self._buckets:
            # Where drafting did not pay at another batch size, begin with a probe.
            distrusted = any(b.next_pause > FIRST_PAUSE for b in self._buckets.values())
            self._buckets[key] = _Bucket(probing=distrusted)
        return self._buckets[key]


def _pays(bucket: _Bucket) -> bool:
    """Whether drafting yields more tokens per millisecond than plain decoding.

    Steps the pause and the probe after it, so once a round.
    """
    if bucket.pause:
        bucket.pause -= 1
        bucket.probing = bucket.pause == 0
        return False
    if bucket.probing:
        # Judge by the probe to come, not by what led to the pause.
        bucket.spec_tokens, bucket.spec_ms = _Average(), _Average()
        return True
    tokens, spec_ms = bucket.spec_tokens.value, bucket.spec_ms.value
    plain_ms = bucket.plain_ms.value
    if tokens is None or spec_ms is None:
        return True
    if plain_ms is None:
        return tokens >= SUSPECT_TOKENS and bucket.num_spec < PLAIN_CHECK_AFTER
    if tokens / spec_ms >= 1 / plain_ms:
        bucket.next_pause = FIRST_PAUSE
        return True
    lost_ms = spec_ms - tokens * plain_ms
    least = math.ceil(lost_ms / (PROBE_COST * plain_ms))
    bucket.pause = min(max(bucket.next_pause, least), LONGEST_PAUSE) - 1
    bucket.next_pause = min(2 * bucket.next_pause, MAX_PAUSE)
    return False
