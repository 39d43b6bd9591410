"""The segments of an answer, in the order in which they were decided."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from operator import itemgetter
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_parse.reporting.report import RoundRecord


@dataclass(frozen=True)
class SegmentReport:
    """One span of draft or target text."""

    #: `draft`, `client` (text that came with the request) or `target`.
    origin: str
    #: `kept` (by verdict or agreement), `rejected` (never part of the output) or
    #: `written` (the target's own).
    outcome: str
    #: Output token offset. A rejected span stood there. Where a text is judged alone,
    #: the offset is in that text.
    start: int
    #: Token ids of the span.
    token_ids: Sequence[int]
    #: The verdict on the prefix that ends here, None without one.
    score: float | None = None
    #: Name of the drafter that wrote it, "" where no drafter did.
    drafter: str = ""
    #: Who gave the verdict, `suffix` for a judge suffix; "" without one.
    judge: str = ""


@dataclass
class SegmentTrail:
    """What became of each span of the drafts, and what the target wrote itself."""

    spans: list[SegmentReport] = field(default_factory=list)

    def write(self, start: int, num_tokens: int) -> None:
        """A span of the target's own; only its length counts until the end."""
        last = self.spans[-1] if self.spans else None
        if last and last.outcome == "written":
            start, num_tokens = last.start, len(last.token_ids) + num_tokens
            self.spans.pop()
        self.spans.append(SegmentReport("target", "written", start, range(num_tokens)))

    def add_round(self, one: RoundRecord) -> None:
        """The segments of one round."""
        start = one.exact_end
        if start and (one.num_judged or one.boundaries):
            outcome = "kept" if one.num_judged else "rejected"
            self.spans += _split(one, outcome, 0, start, None)
        judges = one.judged_by or ["suffix"] * len(one.boundaries)
        verdicts = zip(one.boundaries, one.scores, judges, strict=True)
        for boundary, score, judge in verdicts:
            outcome = "kept" if boundary <= one.num_judged else "rejected"
            if one.num_judged < one.exact_end:  # about a text that the target left
                self.spans += _split(one, outcome, start, boundary, None)
            else:
                self.spans += _split(one, outcome, start, boundary, score, judge)
            start = boundary
        if not one.accept_tokens:
            return
        if one.num_kept > one.num_judged:
            self.spans += _split(one, "kept", one.num_judged, one.num_kept, None)
        where = one.output_len + one.num_kept
        self.write(where, len(one.accept_tokens) - one.num_kept)

    def end(self, output_ids: Sequence[int]) -> None:
        """The output ended with these tokens: cut off what is not in it, and give the
        target's spans their tokens."""
        self.spans = list(_within(self.spans, output_ids))


def _split(
    one: RoundRecord,
    outcome: str,
    start: int,
    end: int,
    score: float | None,
    judge: str = "",
) -> Iterator[SegmentReport]:
    """Draft tokens [start, end), split where the client's text ends, and where another
    drafter's begins. The verdict of their segment is on all parts."""
    in_place = outcome == "kept" or not one.accept_tokens
    where = one.output_len + (start if in_place else min(start, one.num_judged))
    for origin, drafter, a, b in _parts(one, start, end):
        offset = where + (a - start if in_place else 0)
        tokens = tuple(one.draft_tokens[a:b])
        yield SegmentReport(origin, outcome, offset, tokens, score, drafter, judge)


def _parts(
    one: RoundRecord, start: int, end: int
) -> Iterator[tuple[str, str, int, int]]:
    """(origin, drafter, start, end) of the parts of draft tokens [start, end)."""
    at = 0
    runs = [("client", "", one.num_client)]
    for name, of_one in groupby(one.written_by, key=itemgetter(0)):  # over rounds
        runs.append(("draft", name, sum(num for _, num in of_one)))
    for origin, drafter, num in (*runs, ("draft", "", end)):
        first, last = max(start, at), min(end, at + num)
        if first < last:
            yield origin, drafter, first, last
        at += num


def _within(
    spans: Sequence[SegmentReport], output_ids: Sequence[int]
) -> Iterator[SegmentReport]:
    """Spans of the output as it ended, the target's with their tokens."""
    for span in spans:
        if span.outcome == "rejected":
            yield span
            continue
        end = span.start + len(span.token_ids)
        if tokens := tuple(output_ids[span.start : end]):
            yield replace(span, token_ids=tokens)
