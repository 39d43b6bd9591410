"""How long drafts last: chances per token, learnt from what became of drafts; pure."""

from __future__ import annotations

import math

from sglang_parse.requests.round_records import RequestRound

# Tokens after which what was seen counts for half.
MEMORY = 4096.0
# A change is believed once ends come clearly this many times as often, or as seldom, as
# before: once the logarithm of the likelihood ratio for that exceeds the evidence.
CHANGE, EVIDENCE = 3.0, 10.0
# Mean length of the segment that a token lies in, over the mean length of a segment: a
# token lies in a long segment more likely than in a short one.
BIASED = 1.23
# Segments, of mean length, that a draft has to be as long as to hold a boundary.
ENOUGH_SEGMENTS = 1.5


class Rate:
    """Chance per token that something ends.

    guess: before anything is seen; weight: tokens that it counts for. Latest counts
    replace all earlier ones where a sum test (CUSUM) says that the chance has changed.
    """

    def __init__(self, guess: float, weight: float, memory: float = MEMORY) -> None:
        self._guess, self._weight, self._memory = guess * weight, weight, memory
        self.num_seen = self.num_ends = 0.0
        self._restart()

    def _restart(self) -> None:
        #: By factor: evidence that ends come so many times as often, and the tokens and
        #: ends since it was 0.
        self._changes = dict.fromkeys((CHANGE, 1 / CHANGE), (0.0, 0.0, 0.0))

    @property
    def value(self) -> float:
        chance = (self.num_ends + self._guess) / (self.num_seen + self._weight)
        return min(max(chance, 1e-6), 0.999)

    def observe(self, num_tokens: float, num_ends: float) -> None:
        """That many of the tokens ended it."""
        before = self.value
        keep = 0.5 if self.num_seen + num_tokens > self._memory else 1.0
        self.num_seen = keep * (self.num_seen + num_tokens)
        self.num_ends = keep * (self.num_ends + num_ends)
        for factor, (evidence, seen, ends) in self._changes.items():
            evidence += num_ends * math.log(factor) - (factor - 1) * before * num_tokens
            one = (evidence, seen + num_tokens, ends + num_ends)
            self._changes[factor] = one if evidence > 0 else (0.0, 0.0, 0.0)
            if evidence > EVIDENCE:
                self.num_seen, self.num_ends = one[1:]
                return self._restart()

    def mean(self, num: float) -> float:
        """Tokens that it lasts on average, cut off at `num`."""
        on = 1 - self.value
        return on * (1 - on**num) / self.value


class Acceptance:
    """What is known of drafts."""

    def __init__(self) -> None:
        #: Until a verdict fails.
        self.valid = Rate(1 / 96, weight=48, memory=4 * MEMORY)
        #: Until the target disagrees with a draft model, and with a head.
        self.followed, self.head = Rate(0.2, weight=16), Rate(0.2, weight=16)
        #: The same of a draft model, without the segments that failed, which disagree
        #: sooner than what is written after them.
        self.rewritten = Rate(0.2, weight=16)
        #: That a segment ends, and that a draft ends its answer.
        self.boundary, self.ended = Rate(1 / 24, weight=48), Rate(1 / 2048, weight=256)

    @property
    def segment_len(self) -> float:
        """Mean length of a segment in tokens."""
        return 1 / self.boundary.value

    def drafted(self, window: int) -> float:
        """Mean length of a draft: some end their answers before the window does."""
        rate = self.ended.value
        return -math.expm1(-rate * window) / rate

    def learn(self, r: RequestRound, *, judged: bool) -> None:
        """How long this request's draft lasted, before its state moves on."""
        draft, cut = r.draft, r.kept.cut
        if not draft.tokens or r.error is not None:
            return
        if draft.num_new:
            self.ended.observe(draft.num_new, int(draft.ended))
        is_judged = judged and r.state.options.mode == "semantic"
        if is_judged:
            # Pending tokens were looked at before, and held no boundary.
            num = min(len(draft.tokens) - r.exact_end, draft.num_new)
            self.boundary.observe(num, r.segments.num_found)
        has_verdicts = is_judged and bool(r.boundaries)
        end = cut.exact_end or (0 if has_verdicts else cut.tail_end)
        # The target was followed from the beginning of the draft.
        if end and not draft.num_copied:
            rate = self.followed
            if draft.num_token_level:
                rate, end = self.head, min(end, draft.num_token_level)
            num = min(r.decision.num_correct_drafts, end)
            for one in (rate, self.rewritten) if rate is self.followed else (rate,):
                one.observe(num + (num < end), int(num < end))
        if has_verdicts:
            self._learn_verdicts(r)

    def _learn_verdicts(self, r: RequestRound) -> None:
        judged = max(r.rejected_end, r.decision.num_judged) - r.exact_end
        # Of segments that failed together, one failure is counted.
        fails = r.rejected_end > r.state.num_suspect
        kept, end = r.kept.cut.num_kept, r.kept.cut.tail_end
        if r.rejected_end:
            # The error is taken to be in the middle of the part that failed.
            num = max(0, (kept + r.rejected_end) // 2 - r.exact_end - 1)
            self.valid.observe(num + fails, int(fails))
            if end > kept:
                num = r.decision.num_matched
                self.followed.observe(num + (kept + num < end), int(kept + num < end))
        elif judged > 0:
            self.valid.observe(judged, 0)
