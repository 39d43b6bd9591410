"""A self-contained HTML page of one answer: segments coloured by origin and score."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any

from sglang_parse.cli.trace_text import LABELS, Span, answer_spans, origin_of

STYLE = """
:root { color-scheme: light dark; --text: #1c1e21; --back: #ffffff; --soft: #5c636b;
  --line: #d5d9de; --panel: #f6f7f9; --kept: #1f9d55; --client: #a23bc6;
  --agreed: #1787b8; --written: #d99100; --rejected: #d1293d; }
@media (prefers-color-scheme: dark) {
  :root { --text: #e6e8eb; --back: #14171a; --soft: #9aa3ad; --line: #343a41;
    --panel: #1d2126; --kept: #35c27a; --client: #cf7bea; --agreed: #45b5e6;
    --written: #f0b73f; --rejected: #ff6b7c; } }
* { box-sizing: border-box; }
body { margin: 2rem auto; max-width: 60rem; padding: 0 1rem; color: var(--text);
  background: var(--back); font: 16px/1.6 system-ui, sans-serif; }
h1 { font-size: 1.25rem; } h2 { font-size: 1rem; margin: 1.5rem 0 .5rem; }
.soft, label { color: var(--soft); font-size: .875rem; }
.question, .answer { white-space: pre-wrap; overflow-wrap: anywhere; padding: 1rem;
  border: 1px solid var(--line); border-radius: 8px; background: var(--panel); }
.answer { font: 15px/1.9 ui-monospace, monospace; overflow: visible; }
.seg { position: relative; border-radius: 3px; padding: .1em 0;
  -webkit-box-decoration-break: clone; box-decoration-break: clone;
  border-bottom: 2px solid var(--c);
  background: color-mix(in srgb, var(--c) var(--strength), transparent); }
.seg:focus { outline: 2px solid var(--c); }
.seg:hover, .seg:focus {
  background: color-mix(in srgb, var(--c) 45%, transparent); }
.seg:hover::after, .seg:focus::after { content: attr(data-tip); position: absolute;
  left: 0; top: 100%; z-index: 1; width: max-content; max-width: 20rem;
  padding: .3em .6em; border-radius: 4px; background: var(--text); color: var(--back);
  font: 13px/1.4 system-ui, sans-serif; text-decoration: none; white-space: pre-line; }
.kept { --c: var(--kept); } .client { --c: var(--client); }
.agreed { --c: var(--agreed); } .written { --c: var(--written); }
.rejected { --c: var(--rejected); }
.rejected s { text-decoration-color: var(--rejected); opacity: .75; }
#hide:checked ~ .answer .rejected { display: none; }
.legend { display: flex; flex-wrap: wrap; gap: .4rem 1rem; margin: .75rem 0; padding: 0;
  list-style: none; font-size: .875rem; }
.legend .seg { padding: .1em .4em; }
table { border-collapse: collapse; font-size: .875rem; }
th, td { border-bottom: 1px solid var(--line); padding: .3rem .5rem; text-align: left;
  vertical-align: top; }
td.n { text-align: right; font-variant-numeric: tabular-nums; }
td.t { white-space: pre-wrap; overflow-wrap: anywhere; font-family: ui-monospace,
  monospace; }
"""
ROWS = (
    ("mode", "Mode served"),
    ("fallback", "Not the mode asked for because of"),
    ("target_passes", "Target passes"),
    ("draft_tokens", "Tokens drafted by the draft model"),
    ("eagle_draft_tokens", "Tokens drafted by the target's head"),
    ("client_tokens", "Tokens of the client's own text tried"),
    ("judged_segments", "Segments judged"),
    ("probe_segments", "Of these, judged by the probe"),
    ("kept_segments", "Segments kept"),
    ("kept_tokens", "Draft and client tokens in the answer"),
    ("matched_tokens", "Of these, kept token by token"),
    ("written_tokens", "Tokens written by the target"),
)


def render(model: str, question: str, answer: str, report: Mapping[str, Any]) -> str:
    """The page. report: `meta_info["parse"][0]` with its segments."""
    spans = answer_spans(answer, report)
    kinds = dict.fromkeys(span.kind for span in spans)
    legend = "".join(
        f'<li><span class="seg {kind}" style="--strength: 25%">'
        f"{escape(LABELS[kind])}</span></li>"
        for kind in LABELS
        if kind in kinds
    )
    body = "".join(map(_span, spans))
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>PARSE trace</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f'<h1>PARSE trace</h1>\n<p class="soft">{escape(model)}</p>\n'
        f'<h2>Question</h2>\n<div class="question">{escape(question)}</div>\n'
        "<h2>Answer</h2>\n"
        '<p class="soft">The stronger the colour, the higher the score. Hover over a '
        "segment, or move to it with the Tab key.</p>\n"
        f'<ul class="legend">{legend}</ul>\n'
        '<input type="checkbox" id="hide"> <label for="hide">without what was '
        "rejected</label>\n"
        f'<div class="answer">{body}</div>\n'
        f"<h2>Counts</h2>\n<table>{_counts(report)}</table>\n"
        f"<details>\n<summary><h2 style='display: inline'>All segments</h2></summary>\n"
        f"<table>{_segments(report)}</table>\n</details>\n</body>\n</html>\n"
    )


def _span(span: Span) -> str:
    # Unscored text in a middle shade; scores run from faint to strong.
    strength = 20 if span.score is None else round(8 + 27 * min(1.0, span.score))
    text = escape(span.text)
    if span.kind == "rejected":
        text = f"<s>{text}</s>"
    return (
        f'<span class="seg {span.kind}" tabindex="0" style="--strength: {strength}%" '
        f'data-tip="{escape(tip(span))}">{text}</span>'
    )


def tip(span: Span) -> str:
    """What the page says about a segment on hover."""
    parts = [LABELS[span.kind]]
    if span.origin != "target":
        parts.append(f"origin: {span.origin}")
    if span.score is not None:
        parts.append(f"score {span.score:.4f}{_by(span.judge)}")
    if span.num_later:
        parts.append(f"{span.num_later} later segments dropped with it")
    return ", ".join(parts)


def _by(judge: str) -> str:
    """Who gave a verdict, where it was not the question."""
    return " by the probe" if judge == "probe" else ""


def _counts(report: Mapping[str, Any]) -> str:
    return "".join(
        f'<tr><td>{name}</td><td class="n">{escape(str(report[key]))}</td></tr>'
        for key, name in ROWS
        if report.get(key)
    )


def _segments(report: Mapping[str, Any]) -> str:
    rows = ["<tr><th>#<th>origin<th>outcome<th>token<th>tokens<th>score<th>text</tr>"]
    for k, segment in enumerate(report.get("segments", ()), 1):
        score = segment["score"]
        shown = "" if score is None else f"{score:.4f}{_by(segment.get('judge', ''))}"
        rows.append(
            f'<tr><td class="n">{k}</td><td>{escape(origin_of(segment))}</td>'
            f"<td>{escape(segment['outcome'])}</td>"
            f'<td class="n">{segment["start"]}</td>'
            f'<td class="n">{len(segment["token_ids"])}</td>'
            f'<td class="n">{shown}</td><td class="t">{escape(segment["text"])}</td>'
            "</tr>"
        )
    return "\n".join(rows)
