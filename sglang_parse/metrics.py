"""Counters of one request and of the server, each defined once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class SegmentReport:
    """One span of draft or target text in the order it was decided.

    origin: `draft` or `target`. outcome: `kept` (verdict or agreement), `rejected`
    (never part of the output) or `written` (the target's own token). score: the
    verdict on the prefix that ends here, None without one. start: output token offset.
    """

    origin: str
    outcome: str
    start: int
    token_ids: tuple[int, ...]
    score: float | None = None


@dataclass
class RequestCounters:
    """What PARSE did for one request; token counts unless the name says otherwise.

    target_passes: forwards of the target in decode rounds. draft_tokens: newly
    drafted. judged_tokens: draft tokens under some verdict. kept_tokens: draft tokens
    in the output, of which matched_tokens by the exact tail. written_tokens: the
    target's own.
    """

    target_passes: int = 0
    draft_tokens: int = 0
    judged_segments: int = 0
    kept_segments: int = 0
    judged_tokens: int = 0
    kept_tokens: int = 0
    matched_tokens: int = 0
    written_tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)


@dataclass
class RequestReport:
    """`meta_info["parse"]` of one request."""

    mode: str
    fallback: str
    want_segments: bool
    counters: RequestCounters = field(default_factory=RequestCounters)
    segments: list[SegmentReport] = field(default_factory=list)

    def as_dict(self) -> dict[str, Any]:
        result: dict[str, Any] = {"mode": self.mode, **self.counters.as_dict()}
        if self.fallback:
            result["fallback"] = self.fallback
        if self.want_segments:
            result["segments"] = [asdict(s) for s in self.segments]
        return result

    def record(
        self,
        *,
        output_len: int,
        draft_tokens: Sequence[int],
        num_new_drafts: int,
        boundaries: Sequence[int],
        scores: Sequence[float],
        num_judged: int,
        num_matched: int,
        accept_tokens: Sequence[int],
    ) -> None:
        """Count one round. output_len: output tokens before it."""
        c = self.counters
        num_kept = num_judged + num_matched
        c.target_passes += 1
        c.draft_tokens += num_new_drafts
        c.judged_segments += len(boundaries)
        c.kept_segments += sum(1 for b in boundaries if b <= num_judged)
        c.judged_tokens += boundaries[-1] if boundaries else 0
        c.kept_tokens += num_kept
        c.matched_tokens += num_matched
        c.written_tokens += len(accept_tokens) - num_kept
        if not self.want_segments:
            return
        start = 0
        for boundary, score in zip(boundaries, scores, strict=True):
            outcome = "kept" if boundary <= num_judged else "rejected"
            span = tuple(draft_tokens[start:boundary])
            where = output_len + min(start, num_judged)
            self.segments.append(SegmentReport("draft", outcome, where, span, score))
            start = boundary
        if num_matched:
            span = tuple(accept_tokens[num_judged:num_kept])
            where = output_len + num_judged
            self.segments.append(SegmentReport("draft", "kept", where, span))
        span = tuple(accept_tokens[num_kept:])
        where = output_len + num_kept
        self.segments.append(SegmentReport("target", "written", where, span))
