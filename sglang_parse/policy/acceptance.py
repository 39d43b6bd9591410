"""How long drafts last: chances per token, learnt from what became of drafts; pure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from sglang_parse.requests.round_records import RequestRound
from sglang_parse.requests.state import RequestState

# Tokens after which what was seen counts for half.
MEMORY = 4096.0
# A change is believed once ends come clearly this many times as often, or as seldom, as
# before: once the logarithm of the likelihood ratio for that exceeds the evidence.
CHANGE, EVIDENCE = 3.0, 10.0
# Failing verdicts of its own that the rate of all requests counts for with a request.
TRUST = 4.0
# Mean length of the segment that a token lies in, over the mean length of a segment: a
# token lies in a long segment more likely than in a short one.
BIASED = 1.23


class Rate:
    """Chance per token that something ends.

    guess: before anything is seen; weight: tokens that it counts for. Latest counts
    replace all earlier ones where a sum test (CUSUM) says that the chance has changed.
    """

    def __init__(self, guess: float, *, weight: float, memory: float = MEMORY) -> None:
        self._guess = guess * weight
        self._weight = weight
        self._memory = memory
        self.num_seen = self.num_ends = 0.0
        #: By factor: evidence that ends come so many times as often, and the tokens and
        #: ends since it was 0.
        self._changes = {CHANGE: (0.0, 0.0, 0.0), 1 / CHANGE: (0.0, 0.0, 0.0)}

    @property
    def value(self) -> float:
        chance = (self.num_ends + self._guess) / (self.num_seen + self._weight)
        return min(max(chance, 1e-6), 0.999)

    def observe(self, num_tokens: float, num_ends: float) -> None:
        """That many of the tokens ended it."""
        before = self.value
        self.num_seen += num_tokens
        self.num_ends += num_ends
        if self.num_seen > self._memory:
            self.forget(0.5)
        for factor, (evidence, seen, ends) in self._changes.items():
            evidence += num_ends * math.log(factor) - (factor - 1) * before * num_tokens
            one = (evidence, seen + num_tokens, ends + num_ends)
            self._changes[factor] = one if evidence > 0 else (0.0, 0.0, 0.0)
            if evidence > EVIDENCE:
                self.num_seen, self.num_ends = one[1:]
                self._changes = dict.fromkeys(self._changes, (0.0, 0.0, 0.0))
                return

    def forget(self, share: float) -> None:
        """Let what was seen count for this share."""
        self.num_seen *= share
        self.num_ends *= share

    def lasts(self, num: float) -> float:
        """Chance that it lasts longer than `num` tokens."""
        return (1 - self.value) ** num

    def mean(self, num: float) -> float:
        """Tokens that it lasts on average, cut off at `num`."""
        return (1 - self.value) * (1 - self.lasts(num)) / self.value


@dataclass
class Acceptance:
    """What is known of drafts.

    valid: until a verdict fails. recovering, followed: until the target disagrees,
    while it rewrites a segment and elsewhere. lost: that the remaining draft tokens are
    dropped after the last boundary of a kept draft, since the target goes on otherwise;
    a chance per draft. boundary: that a segment ends. ended: that a draft ends its
    answer.
    """

    valid: Rate = field(default_factory=lambda: Rate(1 / 96, weight=48, memory=16384))
    recovering: Rate = field(default_factory=lambda: Rate(0.2, weight=16))
    followed: Rate = field(default_factory=lambda: Rate(0.2, weight=16))
    lost: Rate = field(default_factory=lambda: Rate(0.2, weight=16, memory=1024))
    boundary: Rate = field(default_factory=lambda: Rate(1 / 24, weight=48))
    ended: Rate = field(default_factory=lambda: Rate(1 / 2048, weight=256))
    #: Failing verdicts and judged tokens of each request.
    by_request: WeakKeyDictionary[RequestState, tuple[float, float]] = field(
        default_factory=WeakKeyDictionary
    )

    @property
    def segment_len(self) -> float:
        """Mean length of a segment in tokens."""
        return 1 / self.boundary.value

    def rewritten(self, num: float) -> float:
        """Tokens of a failing segment until the target disagrees, cut off at `num`. It
        agrees no longer there than elsewhere."""
        return min(self.recovering.mean(num), self.followed.mean(num))

    def drafted(self, window: int) -> float:
        """Mean length of a draft: some end their answers before the window does."""
        rate = self.ended.value
        return -math.expm1(-rate * window) / rate

    def own_window(self, state: RequestState, window: int) -> int:
        """Window of a request where others have `window`: the best one goes with one
        over the square root of the failure rate."""
        if state not in self.by_request:
            return window
        failures, judged = self.by_request[state]
        rate = self.valid.value
        own = (TRUST + failures) / (TRUST / rate + judged)
        least = round(1.5 * self.segment_len)
        return min(window, max(least, round(window * math.sqrt(rate / own))))

    # -- What a round shows ----------------------------------------------------

    def learn(self, r: RequestRound, *, judged: bool) -> None:
        """How long this request's draft lasted, before its state moves on."""
        if not r.draft.tokens or r.error is not None:
            return
        if r.draft.num_new:
            self.ended.observe(r.draft.num_new, int(r.draft.ended))
        is_judged = judged and r.state.options.mode == "semantic"
        if is_judged:
            # Pending tokens were looked at before, and held no boundary.
            num = min(len(r.draft.tokens) - r.exact_end, r.draft.num_new)
            self.boundary.observe(num, r.segments.num_found)
        if r.kept.cut.exact_end or not (is_judged and r.boundaries):
            self._learn_agreement(r, recovering=judged and bool(r.state.recovering))
        if is_judged and r.boundaries:
            self._learn_verdicts(r)

    def _learn_agreement(self, r: RequestRound, *, recovering: bool) -> None:
        """Where the target was followed from the beginning of the draft."""
        end = r.kept.cut.exact_end or r.kept.cut.tail_end
        if not end or r.draft.num_token_level:
            return  # HeadGate and CopySurvival learn of these.
        rate = self.recovering if recovering and r.kept.cut.exact_end else self.followed
        num = min(r.decision.num_correct_drafts, end)
        rate.observe(num + (num < end), int(num < end))

    def _learn_verdicts(self, r: RequestRound) -> None:
        judged = max(r.rejected_end, r.decision.num_judged) - r.exact_end
        # Of segments that failed together, one failure is counted.
        fails = r.rejected_end > r.state.num_suspect
        if judged > 0:
            failures, tokens = self.by_request.get(r.state, (0.0, 0.0))
            self.by_request[r.state] = failures + fails, tokens + judged
        if r.rejected_end:
            kept = r.kept.cut.num_kept
            right = error_at(self.valid.value, r.rejected_end - kept)
            num = max(0, round(kept - r.exact_end + right) - 1)
            self.valid.observe(num + fails, int(fails))
            if r.kept.cut.tail_end > kept:
                num = r.decision.num_matched
                ended = kept + num < r.kept.cut.tail_end
                self.recovering.observe(num + ended, int(ended))
        elif judged > 0:
            self.valid.observe(judged, 0)
            if not r.draft.ended and len(r.draft.tokens) > r.kept.cut.num_kept:
                self.lost.observe(1, int(not r.decision.pending))


def error_at(rate: float, length: int) -> float:
    """Where the first error is on average in a failing part of `length` tokens: in its
    middle, and the nearer to its beginning, the more errors there are per token."""
    if rate * length < 1e-3:
        return length / 2
    return 1 / rate - length / math.expm1(min(rate * length, 50.0))
