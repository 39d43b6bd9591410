"""Counters of one request and of the server, each defined once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from sglang_parse.client import ClientText

# Tokens before a segment that its text is decoded behind; up to MAX_CONTEXT where
# fewer show no whole character, only parts (PART) or nothing.
CONTEXT = 16
MAX_CONTEXT = 64
PART = "\ufffd"


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
    token_ids: Sequence[int]
    score: float | None = None


@dataclass
class RequestCounters:
    """What PARSE did for one request; token counts unless the name says otherwise.

    target_passes: forwards of the target after the prefill. draft_tokens: newly
    drafted by the draft model. eagle_draft_tokens: drafted by the EAGLE-3 head, of
    which eagle_kept_tokens stand in the output. client_tokens: of the client's own
    text, tried as a draft. judged_segments: that got a verdict (several under one count
    as one), of which kept_segments passed, even where a stop cut them off.
    judged_tokens: draft tokens under some verdict. kept_tokens: drafted and client
    tokens in the output, of which matched_tokens token by token and kept_client_tokens
    from the client. written_tokens: the target's own in the output.
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


@dataclass(frozen=True, slots=True)
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
        return self.num_matched + min(self.num_head, self.num_judged)

    def only_kept(self, num_tokens: int) -> RoundRecord:
        """What is counted as kept of it, where only its first num_tokens stand."""
        num_judged = min(self.num_judged, num_tokens)
        return RoundRecord(
            self.output_len,
            (),
            num_client=self.num_client,
            num_eagle=self.num_eagle,
            num_head=self.num_head,
            num_judged=num_judged,
            num_matched=min(self.num_matched, num_tokens - num_judged),
        )


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
    # Rounds with kept tokens in the output, as far as these are in it.
    _kept: list[RoundRecord] = field(default_factory=list)

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
            self._count_kept(one.only_kept(one.num_kept))
            c.written_tokens += len(one.accept_tokens) - one.num_kept
            self.num_counted += len(one.accept_tokens)
        if self.want_segments:
            self._record_segments(one)

    def finish(self, output_ids: Sequence[int]) -> None:
        """The request ended with these tokens: a stop may have cut rounds off, a
        retraction tokens that were decided ahead."""
        if self.judged_text is not None:
            return
        self._count_written(len(output_ids))
        self._take_back(len(output_ids))
        self.segments = _within(self.segments, output_ids)

    def as_dict(
        self, output_ids: Sequence[int], decode: Callable[[list[int]], str]
    ) -> dict[str, Any]:
        """The finished report. decode: token ids to text."""
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

    def _count_kept(self, one: RoundRecord, sign: int = 1) -> None:
        if not one.num_kept:
            return
        c = self.counters
        c.kept_tokens += sign * one.num_kept
        c.kept_client_tokens += sign * min(one.num_client, one.num_kept)
        c.eagle_kept_tokens += sign * min(one.num_eagle, one.num_kept)
        c.matched_tokens += sign * one.num_agreed
        if sign > 0:
            self._kept.append(one)

    def _take_back(self, output_len: int) -> None:
        """Count nothing behind the first output_len tokens."""
        if self.num_counted <= output_len:
            return
        while self._kept:
            one = self._kept[-1]
            left = max(0, output_len - one.output_len)
            if left >= one.num_kept:
                break
            self._kept.pop()
            self._count_kept(one, -1)
            self._count_kept(one.only_kept(left))
        self.counters.written_tokens = output_len - self.counters.kept_tokens
        self.num_counted = output_len

    def _write(self, start: int, num_tokens: int) -> None:
        """A span of the target's own; only its length counts until the end."""
        last = self.segments[-1] if self.segments else None
        if last and last.outcome == "written":
            start, num_tokens = last.start, len(last.token_ids) + num_tokens
            self.segments.pop()
        self.segments.append(
            SegmentReport("target", "written", start, range(num_tokens))
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

    A token may hold half a character, so a place is as many characters as the tokens
    before it decode to, and the text of a segment that stands in the output is cut out
    of the output's. A rejected one's is what its tokens add to those before it.
    """
    ids = list(output_ids)
    places = {len(ids)}
    for segment in segments:
        places.add(min(segment.start, len(ids)))
        if segment.outcome != "rejected":
            places.add(segment.start + len(segment.token_ids))
    text = decode(ids)
    at = _places(ids, sorted(places), decode, len(text))
    result = []
    for segment in segments:
        start, context = at[min(segment.start, len(ids))]
        if segment.outcome == "rejected":
            own = decode([*context, *segment.token_ids])[len(decode(context)) :]
        else:
            own = text[start : at[segment.start + len(segment.token_ids)][0]]
        result.append({**asdict(segment), "text": own, "text_start": start})
    return result


def _places(
    ids: Sequence[int],
    places: Sequence[int],
    decode: Callable[[list[int]], str],
    num_chars: int,
) -> dict[int, tuple[int, list[int]]]:
    """For each of the rising places: how many characters come before it, and as many of
    the tokens before it as it takes to decode what follows. num_chars: of all ids."""
    found = []
    context: list[int] = []
    at = left_out = 0  # left_out: characters before the context
    for place in places:
        context = [*context, *ids[at:place]]
        at = place
        text = decode(context)
        num_before = left_out + len(text)
        context, text = _shortened(context, text, decode)
        left_out = num_before - len(text)
        found.append((place, num_before, context))
    # Parts of a character may decode to more characters than the whole of it.
    result = {}
    for place, num_before, context in reversed(found):
        if place < len(ids):
            num_chars = min(num_chars, num_before)
        result[place] = num_chars, context
    return result


def _shortened(
    context: list[int], text: str, decode: Callable[[list[int]], str]
) -> tuple[list[int], str]:
    """The end of the context that is enough to decode what follows, and its text.

    It has to show a whole character: then neither a space at the start of what follows
    nor the rest of a character is decoded as if nothing came before.
    """
    size = CONTEXT
    while size < len(context):
        shown = decode(context[-size:])
        whole = shown.lstrip(PART)
        if whole and text.endswith(whole):
            return context[-size:], shown
        size *= 2
    if len(context) > MAX_CONTEXT:
        # Twice, as a space alone may decode to nothing.
        context = [token for token in context if decode([token, token])][-CONTEXT:]
        text = decode(context)
    return context, text
