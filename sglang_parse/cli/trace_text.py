"""A PARSE answer drawn with what happened to each of its segments."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.text import Text

from sglang_parse.demo.figures import RequestResult

#: Kind of a span -> its style, and its words in the legend.
KINDS = {
    "kept": ("green", "draft, kept [score]"),
    "client": ("magenta", "client's text, kept [score]"),
    "agreed": ("cyan", "kept, equal to the target's own choice"),
    "written": ("bold yellow", "written by the target"),
    "rejected": ("red strike", "rejected"),
}
SURE = 0.9  # lower scores are drawn in another colour
# What a terminal would obey: control characters but for tab and line feed, and marks
# that change the direction of text. Lone surrogates cannot be printed.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
    "\ud800-\udfff]"
)


@dataclass(frozen=True)
class Span:
    """A piece of the answer, or a rejected piece in its place.

    kind: a key of KINDS. score: the verdict on the prefix that ends here. num_later:
    rejected segments that followed and went with this one. judge: what gave the score,
    `suffix` for a judge suffix.
    """

    kind: str
    text: str
    score: float | None = None
    num_later: int = 0
    judge: str = ""


def answer_spans(text: str, report: Mapping[str, Any]) -> list[Span]:
    """The answer in the order it was decided, rejected segments in their place.

    text: the output. report: `meta_info["parse"][0]` with its segments. Output that no
    segment names is the target's. Of segments rejected in a row only the first is
    listed. Raises ValueError where a segment lacks a field.
    """
    spans: list[Span] = []
    at = 0
    try:
        for segment in report.get("segments", ()):
            start, kind = segment["text_start"], _kind(segment)
            if start > at:
                spans.append(Span("written", text[at:start]))
                at = start
            if kind == "rejected" and spans and spans[-1].kind == "rejected":
                first = spans.pop()
                spans.append(replace(first, num_later=first.num_later + 1))
                continue
            judge = segment.get("judge", "")
            spans.append(Span(kind, segment["text"], segment["score"], judge=judge))
            if kind != "rejected":
                at += len(segment["text"])
    except KeyError as error:
        raise ValueError(
            f"A segment of the report lacks {error}; expected a report from a server "
            "with this version of sglang_parse."
        ) from error
    if at < len(text):
        spans.append(Span("written", text[at:]))
    return [replace(s, text=printable(s.text)) for s in spans if s.text]


def printable(text: str) -> str:
    """`text` with a replacement character for each one that a terminal would obey."""
    return _UNPRINTABLE.sub("\ufffd", text)


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
        style, _ = KINDS[span.kind]
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
    by = f" by the {span.judge}" if span.judge not in ("", "suffix") else ""
    return "" if span.score is None else f" [{span.score:.2f}{by}{later}]"


def legend(*, marks: bool = False, has_client: bool = False) -> Text:
    """What the colours, or the marks, of `draw_answer` mean."""
    text = Text()
    for kind, (style, label) in KINDS.items():
        if kind == "client" and not has_client:
            continue
        text.append("x " if kind == "rejected" else "", "red")
        label = f"«{label}»" if kind == "written" and marks else label
        text.append(label, style).append("  ")
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
