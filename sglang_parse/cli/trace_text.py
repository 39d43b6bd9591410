"""A PARSE answer drawn with what happened to each of its segments."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from sglang_parse.bench.figures import RequestResult

STYLES = {
    "kept": "green",
    "client": "magenta",
    "agreed": "cyan",
    "written": "bold yellow",
    "rejected": "red strike",
}
SURE = 0.9  # verdicts below it are worth a look, kept or not
LABELS = {
    "kept": "draft, kept",
    "client": "client's text, kept",
    "agreed": "kept, equal to the target's own choice",
    "written": "written by the target",
    "rejected": "rejected",
}


@dataclass(frozen=True)
class Span:
    """kind: a key of STYLES. score: the verdict on the prefix that ends here.

    origin: `draft`, `client` or `target`. num_later: rejected segments that followed
    and went with this one. judge: who gave the score, `suffix` or `probe`.
    """

    kind: str
    text: str
    score: float | None = None
    num_later: int = 0
    origin: str = "target"
    judge: str = ""


def answer_spans(text: str, report: Mapping[str, Any]) -> list[Span]:
    """The answer in the order it was decided, rejected segments in their place.

    text: the output. report: `meta_info["parse"][0]` with its segments. Output that no
    segment names is the target's. Of segments rejected in a row only the first is
    listed.
    """
    spans: list[Span] = []
    at = 0
    for segment in report.get("segments", ()):
        start, score = segment["text_start"], segment["score"]
        if start > at:
            spans.append(Span("written", text[at:start]))
            at = start
        kind, origin = _kind(segment), origin_of(segment)
        if kind == "rejected" and spans and spans[-1].kind == "rejected":
            first = spans.pop()
            spans.append(replace(first, num_later=first.num_later + 1))
            continue
        judge = segment.get("judge", "")
        spans.append(Span(kind, segment["text"], score, origin=origin, judge=judge))
        if kind != "rejected":
            at += len(segment["text"])
    if at < len(text):
        spans.append(Span("written", text[at:]))
    return [replace(s, text=printable(s.text)) for s in spans if s.text]


# C0 and C1, but for tab and line feed: a terminal would obey them.
_CONTROLS = {c: "\ufffd" for c in (*range(32), *range(127, 160)) if c not in (9, 10)}


def printable(text: str) -> str:
    """`text` with a replacement character for each control character."""
    return text.translate(_CONTROLS)


def origin_of(segment: Mapping[str, Any]) -> str:
    """Whose text a segment is, in words."""
    drafter = segment.get("drafter")
    return f"{segment['origin']} by {drafter}" if drafter else str(segment["origin"])


def _kind(segment: Mapping[str, Any]) -> str:
    if segment["outcome"] != "kept":
        return str(segment["outcome"])
    if segment["score"] is None:
        return "agreed"
    return "client" if segment["origin"] == "client" else "kept"


def draw_answer(spans: Sequence[Span], *, marks: bool = False) -> Text:
    """Lines of the answer, a rejected segment above the line that replaced it.

    marks: put what the target wrote in «», for output without colours.
    """
    drawing, line = Text(), Text()
    for span in spans:
        style = STYLES[span.kind]
        if span.kind == "rejected":
            drawing.append("x ", "red")
            drawing.append(line.plain, "dim")
            drawing.append(span.text.rstrip("\n").replace("\n", " | "), style)
            drawing.append(_tag(span) + "\n", "dim red")
            continue
        body = span.text.rstrip("\n")
        is_marked = marks and span.kind == "written" and body
        line.append(f"«{body}»" if is_marked else body, style)
        if span.score is not None:
            line.append(_tag(span), "dim" if span.score >= SURE else "dim yellow")
        if body != span.text:
            drawing.append("  ").append_text(line).append("\n")
            line = Text()
    if line.plain:
        drawing.append("  ").append_text(line).append("\n")
    return drawing


def _tag(span: Span) -> str:
    later = f", {span.num_later} later dropped" if span.num_later else ""
    by = " by the probe" if span.judge == "probe" else ""
    return "" if span.score is None else f" [{span.score:.2f}{by}{later}]"


def legend(*, marks: bool = False, has_client: bool = False) -> Text:
    """What the colours, or the marks, of `draw_answer` mean."""
    text = Text()
    for kind in STYLES:
        label = LABELS[kind]
        if kind in ("kept", "client"):
            label += " [score]"
        if kind == "client" and not has_client:
            continue
        if kind == "written" and marks:
            label = f"«{label}»"
        if kind == "rejected":
            text.append("x ", "red")
        text.append(label, STYLES[kind]).append("  ")
    text.rstrip()
    return text


def most_telling(results: Sequence[RequestResult]) -> int:
    """Index of the answer to draw: right, with a rejection, and short."""

    def rank(index: int) -> tuple[bool, bool, int]:
        result = results[index]
        report = result.report or {}
        judged, kept = report.get("judged_segments", 0), report.get("kept_segments", 0)
        return not result.correct, judged == kept, result.num_tokens

    return min(range(len(results)), key=rank)
