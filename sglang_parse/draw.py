"""A PARSE answer drawn with what happened to each of its segments."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from rich.text import Text

from sglang_parse.summary import RequestResult

STYLES = {
    "kept": "green",
    "agreed": "cyan",
    "written": "bold yellow",
    "rejected": "red strike",
}
Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Span:
    """kind: a key of STYLES. score: the verdict on the prefix that ends here.

    num_later: rejected segments that followed and went with this one.
    """

    kind: str
    token_ids: tuple[int, ...]
    score: float | None = None
    num_later: int = 0


def answer_spans(result: RequestResult) -> list[Span]:
    """The answer in the order it was decided, rejected segments in their place.

    Output tokens that no segment names, such as the prefill's, are the target's. Of
    segments rejected in a row only the first is listed.
    """
    report = result.report or {}
    spans: list[Span] = []
    at = 0
    for segment in report.get("segments", ()):
        start, ids = segment["start"], tuple(segment["token_ids"])
        if start > at:
            spans.append(Span("written", result.token_ids[at:start]))
            at = start
        kind = _kind(segment)
        if kind == "rejected" and spans and spans[-1].kind == "rejected":
            first = spans.pop()
            ids, num_later = first.token_ids, first.num_later + 1
            spans.append(Span(kind, ids, first.score, num_later))
            continue
        spans.append(Span(kind, ids, segment["score"]))
        if kind != "rejected":
            at += len(ids)
    if at < len(result.token_ids):
        spans.append(Span("written", result.token_ids[at:]))
    return [s for s in spans if s.token_ids]


def _kind(segment: dict[str, Any]) -> str:
    if segment["outcome"] == "kept" and segment["score"] is None:
        return "agreed"
    return str(segment["outcome"])


def draw_answer(spans: Sequence[Span], decode: Decode, *, marks: bool = False) -> Text:
    """Lines of the answer, a rejected segment above the line that replaced it.

    marks: put what the target wrote in «», for output without colours.
    """
    drawing, line = Text(), Text()
    for span in spans:
        text = decode(span.token_ids)
        style = STYLES[span.kind]
        if span.kind == "rejected":
            drawing.append("x ", "red")
            drawing.append(line.plain, "dim")
            drawing.append(text.rstrip("\n").replace("\n", " | "), style)
            drawing.append(_tag(span) + "\n", "dim red")
            continue
        body = text.rstrip("\n")
        is_marked = marks and span.kind == "written" and body
        line.append(f"«{body}»" if is_marked else body, style)
        if span.score is not None:
            line.append(_tag(span), "dim")
        if body != text:
            drawing.append("  ").append_text(line).append("\n")
            line = Text()
    if line.plain:
        drawing.append("  ").append_text(line).append("\n")
    return drawing


def _tag(span: Span) -> str:
    later = f", {span.num_later} later dropped" if span.num_later else ""
    return "" if span.score is None else f" [{span.score:.2f}{later}]"


def legend(*, marks: bool = False) -> Text:
    """What the colours, or the marks, of `draw_answer` mean."""
    written = "written by the target"
    return Text.assemble(
        ("kept [score]", STYLES["kept"]),
        "  ",
        ("kept, equal to the target's own choice", STYLES["agreed"]),
        "  ",
        (f"«{written}»" if marks else written, STYLES["written"]),
        "  ",
        ("x ", "red"),
        ("rejected", STYLES["rejected"]),
    )


def most_telling(results: Sequence[RequestResult]) -> int:
    """Index of the answer to draw: right, with a rejection, and short."""

    def rank(index: int) -> tuple[bool, bool, int]:
        result = results[index]
        report = result.report or {}
        judged, kept = report.get("judged_segments", 0), report.get("kept_segments", 0)
        return not result.correct, judged == kept, result.num_tokens

    return min(range(len(results)), key=rank)
