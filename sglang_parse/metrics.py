"""Counters of one request and of the server, each defined once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sglang_parse.client import ClientText


@dataclass(frozen=True)
class SegmentReport:
    """One span of draft or target text in the order it was decided.

    origin: `draft`, `client` (text that came with the request) or `target`. outcome:
    `kept` (verdict or agreement), `rejected` (never part of the output) or `written`
    (the target's own). score: the verdict on the prefix that ends here, None without
    one. start: output token offset; a rejected span stood there (where a text is judged
    alone: its offset in the text).
    """

    origin: str
    outcome: str
    start: int
    token_ids: tuple[int, ...]
    score: float | None = None


@dataclass
class RequestCounters:
    """What PARSE did for one request; token counts unless the name says otherwise.

    target_passes: forwards of the target after the prefill. draft_tokens: newly
    drafted by the draft model. eagle_draft_tokens: drafted by the EAGLE-3 head, of
    which eagle_kept_tokens stand in the output. client_tokens: of the client's own
    text, tried as a draft. judged_tokens: draft tokens under some verdict. kept_tokens:
    drafted and client tokens in the output, of which matched_tokens token by token and
    kept_client_tokens from the client. written_tokens: the target's own.
    """

    target_passes: int = 0
    draft_tokens: int = 0
    eagle_draft_tokens: int = 0
    eagle_kept_tokens: int = 0
    client_tokens: int = 0
    judged_segments: int = 0
    kept_segments: int = 0
    judged_tokens: int = 0
    kept_tokens: int = 0
    kept_client_tokens: int = 0
    matched_tokens: int = 0
    written_tokens: int = 0

    def as_dict(self) -> dict[str, int]:
        return asdict(self)

    def __add__(self, other: RequestCounters) -> RequestCounters:
        sums = {k: v + getattr(other, k) for k, v in asdict(self).items()}
        return RequestCounters(**sums)


@dataclass(frozen=True)
class RoundRecord:
    """One round of one request, as the report counts it.

    output_len: output tokens before it. draft_tokens: what was verified, of which the
    first num_client tokens come from the client or the first num_eagle from the EAGLE-3
    head, and num_new are newly drafted by the draft model. The first num_head tokens
    had to equal the target's own, verdicts came behind them.
    accept_tokens: num_judged tokens kept by verdict, num_matched by agreement, then
    the target's own; none where a text was judged and nothing generated.
    """

    output_len: int
    accept_tokens: Sequence[int]
    draft_tokens: Sequence[int] = ()
    num_new: int = 0
    num_client: int = 0
    num_eagle: int = 0
    num_head: int = 0
    boundaries: Sequence[int] = ()
    scores: Sequence[float] = ()
    num_judged: int = 0
    num_matched: int = 0
    num_passes: int = 1

    @property
    def num_kept(self) -> int:
        return self.num_judged + self.num_matched

    @property
    def num_agreed(self) -> int:
        """Kept draft tokens that equal the target's own: the head's and the tail's."""
        return self.num_matched + (self.num_head if self.num_judged else 0)


@dataclass
class RequestReport:
    """`meta_info["parse"]` of one request."""

    mode: str
    fallback: str
    want_segments: bool
    counters: RequestCounters = field(default_factory=RequestCounters)
    segments: list[SegmentReport] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    client: ClientText | None = None
    num_counted: int = 0
    # The text of a request that has it judged and nothing generated.
    judged_text: tuple[int, ...] | None = None
    _last: RoundRecord | None = None

    def record(self, one: RoundRecord) -> None:
        """Count one round. Tokens that prefill sampled before it are the target's."""
        self._count_written(one.output_len)
        c = self.counters
        c.target_passes += one.num_passes
        c.draft_tokens += one.num_new
        c.eagle_draft_tokens += one.num_eagle
        c.client_tokens += one.num_client
        c.judged_segments += len(one.boundaries)
        self.scores += one.scores
        c.kept_segments += sum(1 for b in one.boundaries if b <= one.num_judged)
        if one.boundaries:
            c.judged_tokens += one.boundaries[-1] - one.num_head
        if not one.accept_tokens:
            self.judged_text = tuple(one.draft_tokens)
        else:
            c.kept_tokens += one.num_kept
            c.kept_client_tokens += min(one.num_client, one.num_kept)
            c.eagle_kept_tokens += min(one.num_eagle, one.num_kept)
            c.matched_tokens += one.num_agreed
            c.written_tokens += len(one.accept_tokens) - one.num_kept
            self.num_counted += len(one.accept_tokens)
            self._last = one
        if self.want_segments:
            self._record_segments(one)

    def finish(self, output_ids: Sequence[int]) -> None:
        """The request ended with these tokens: a stop may have cut the last round."""
        if self.judged_text is not None:
            return
        self._count_written(len(output_ids))
        cut = self.num_counted - len(output_ids)
        if cut > 0 and self._last is not None:
            c, last = self.counters, self._last
            written = min(cut, len(last.accept_tokens) - last.num_kept)
            kept = min(cut - written, last.num_kept)
            left = last.num_kept - kept
            c.written_tokens -= written
            c.kept_tokens -= kept
            tail = min(kept, last.num_matched)
            head = last.num_agreed - last.num_matched
            c.matched_tokens -= tail + max(0, head - left)
            for name, num in (
                ("kept_client_tokens", last.num_client),
                ("eagle_kept_tokens", last.num_eagle),
            ):
                lost = max(0, min(num, last.num_kept) - left)
                setattr(c, name, getattr(c, name) - lost)
            self.num_counted -= written + kept
        self.segments = _within(self.segments, output_ids)

    def as_dict(
        self, output_ids: Sequence[int], decode: Callable[[list[int]], str]
    ) -> dict[str, Any]:
        """The finished report. decode: token ids to text, special tokens left out."""
        result: dict[str, Any] = {"mode": self.mode, **self.counters.as_dict()}
        if self.fallback:
            result["fallback"] = self.fallback
        if self.client is not None and self.judged_text is None:
            result["client_text_tokens"] = len(self.client.tokens)
            result["accepted_client_text_tokens"] = self.client.num_accepted(output_ids)
        if self.want_segments:
            ids = output_ids if self.judged_text is None else self.judged_text
            result["segments"] = _with_text(self.segments, ids, decode)
        return result

    def _count_written(self, output_len: int) -> None:
        num_written = output_len - self.num_counted
        if num_written <= 0:
            return
        if self.want_segments:
            self._write(self.num_counted, num_written)
        self.counters.written_tokens += num_written
        self.num_counted = output_len

    def _write(self, start: int, num_tokens: int) -> None:
        """A span of the target's own; its tokens are filled in at the end."""
        last = self.segments[-1] if self.segments else None
        if last and last.outcome == "written":
            start, num_tokens = last.start, len(last.token_ids) + num_tokens
            self.segments.pop()
        self.segments.append(
            SegmentReport("target", "written", start, (0,) * num_tokens)
        )

    def _record_segments(self, one: RoundRecord) -> None:
        start = one.num_head
        if start and (one.num_judged or one.boundaries):
            self._add(one, "kept" if one.num_judged else "rejected", 0, start, None)
        for boundary, score in zip(one.boundaries, one.scores, strict=True):
            outcome = "kept" if boundary <= one.num_judged else "rejected"
            self._add(one, outcome, start, boundary, score)
            start = boundary
        if not one.accept_tokens:
            return
        if one.num_kept > one.num_judged:
            self._add(one, "kept", one.num_judged, one.num_kept, None)
        where = one.output_len + one.num_kept
        self._write(where, len(one.accept_tokens) - one.num_kept)

    def _add(
        self,
        one: RoundRecord,
        outcome: str,
        start: int,
        end: int,
        score: float | None,
    ) -> None:
        """Draft tokens [start, end), split where the client's text ends. The verdict of
        their segment is on both parts."""
        in_place = outcome == "kept" or not one.accept_tokens
        where = one.output_len + (start if in_place else min(start, one.num_judged))
        for origin, a, b in (
            ("client", start, min(end, one.num_client)),
            ("draft", max(start, one.num_client), end),
        ):
            if a < b:
                self.segments.append(
                    SegmentReport(
                        origin,
                        outcome,
                        where + (a - start if in_place else 0),
                        tuple(one.draft_tokens[a:b]),
                        score,
                    )
                )


def _within(
    segments: Sequence[SegmentReport], output_ids: Sequence[int]
) -> list[SegmentReport]:
    """Segments of the output as it ended, the target's with their tokens."""
    result = []
    for segment in segments:
        if segment.outcome == "rejected":
            result.append(segment)
            continue
        end = segment.start + len(segment.token_ids)
        tokens = tuple(output_ids[segment.start : end])
        if tokens:
            result.append(replace(segment, token_ids=tokens))
    return result


def _with_text(
    segments: Sequence[SegmentReport],
    output_ids: Sequence[int],
    decode: Callable[[list[int]], str],
) -> list[dict[str, Any]]:
    """Segments as data, with their text and its place in the output text.

    A token may hold half a character, so each text is what its tokens add to the
    decoded output before them.
    """
    ids = list(output_ids)
    result = []
    for segment in segments:
        before = decode(ids[: segment.start])
        whole = decode([*ids[: segment.start], *segment.token_ids])
        text = whole[len(before) :]
        result.append({**asdict(segment), "text": text, "text_start": len(before)})
    return result
