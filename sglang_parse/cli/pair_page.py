"""The page of `sglang-parse report`: text, tables and two plots. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

from sglang_parse.calibrate.loss_bounds import upper_bound

ALONE, SERVED = "target alone", "as served"
EXAMPLES = 5
STYLE = """body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto }
table { border-collapse: collapse } td { padding: .2em .8em }
tr { border-bottom: 1px solid #ccc } pre { background: #f4f4f4; padding: .5em;
white-space: pre-wrap } svg { font-size: 14px; display: block; margin: 1em 0 }"""
PLANTED = """Right answers of the target were cut behind a line that had been made
wrong. Such errors are not those of a draft, so these figures say what the judge can
see, and not how often it errs in use. A verdict passes from """


def report_page(figures: Mapping[str, Any]) -> str:
    """The whole page. figures: as `run_report` collects them."""
    arms, planted = figures["arms"], figures["planted"]
    threshold = figures["settings"]["threshold"]
    right, wrong = verdicts(planted)
    passed = [p for p in planted if p["scores"][-1] >= threshold]
    facts = [(k, v) for k, v in figures.items() if isinstance(v, str | int | float)]
    worse = [[f"{k}:\n{v}" for k, v in row.items()] for row in figures["worse"]]
    parts = [
        tag("h1", f"PARSE: {figures['target']}"),
        tag("p", equivalence(arms[SERVED], figures["margin"])),
        table(facts),
        tag("h2", "Speed, accuracy and drift"),
        table(
            [("", *arms), *((k, *(f[k] for f in arms.values())) for k in arms[ALONE])]
        ),
        bars({arm: float(f["ratio to target"][:-1]) for arm, f in arms.items()}),
        tag("h2", "What became of the drafts, as served"),
        table([(k, v) for k, v in figures["counts"].items() if v]),
        tag("h2", "The judge"),
        tag("p", f"{PLANTED}{threshold:g}."),
        table(false_accepts(planted, threshold)),
        curve(right, wrong) if right and wrong else "",
        tag("h2", f"Answers that became wrong: {len(worse)}"),
        *(tag("pre", "\n\n".join(row)) for row in worse[:EXAMPLES]),
        tag("h2", f"Wrong lines that passed: {len(passed)}"),
        *(
            tag("pre", f"{''.join(p['lines'])}\ninstead of: {p['was']}")
            for p in passed[:EXAMPLES]
        ),
    ]
    data = json.dumps(figures, indent=1).replace("</", "<\\/")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>PARSE report'
        f"</title><style>{STYLE}</style>{''.join(parts)}"
        f'<script type="application/json" id="figures">{data}</script></html>\n'
    )


def equivalence(served: Mapping[str, Any], margin: float) -> str:
    """One sentence on equivalence, at the margin given before the run."""
    low, high = served["change of accuracy, points"]
    said = "are" if -margin < low and high < margin else "are not shown to be"
    return (
        f"Answers as served {said} right as often as the target's to within {margin:g} "
        f"percentage points: the change lies above {low:.1f} and below {high:.1f}, "
        "each at 95% (two one-sided tests)."
    )


def verdicts(planted: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Scores of right prefixes, each counted once, and of the first wrong ones."""
    right = {(p["item"], k): s for p in planted for k, s in enumerate(p["scores"][:-1])}
    return list(right.values()), [p["scores"][-1] for p in planted]


def false_accepts(
    planted: Sequence[Mapping[str, Any]], threshold: float
) -> list[tuple[object, ...]]:
    """What passed of right prefixes, and of wrong ones by kind and by depth."""
    right, wrong = verdicts(planted)
    groups = {"right prefixes": right, "wrong ones": wrong}
    for p in sorted(planted, key=lambda p: (p["kind"], p["third"])):
        for name in (p["kind"], f"in third {p['third'] + 1} of 3 of the answer"):
            groups.setdefault(f"wrong: {name}", []).append(p["scores"][-1])
    rows: list[tuple[object, ...]] = [("", "passed", "of", "95% upper bound")]
    for name, scores in groups.items():
        num = sum(score >= threshold for score in scores)
        bound = upper_bound(num, len(scores))
        rows.append((name, num, len(scores), "-" if bound is None else f"{bound:.1%}"))
    return rows


def bars(ratios: Mapping[str, float]) -> str:
    """A bar for each arm's speed over the target alone."""
    parts = [
        f'<text y="{30 * k + 16}">{escape(arm)}</text><rect x="110" y="{30 * k}" '
        f'width="{400 * ratio / max(ratios.values()):.0f}" height="22" fill="#48c"/>'
        f'<text x="118" y="{30 * k + 16}">{ratio:.2f}x</text>'
        for k, (arm, ratio) in enumerate(ratios.items())
    ]
    return f'<svg width="620" height="{30 * len(ratios)}">{"".join(parts)}</svg>'


def curve(right: Sequence[float], wrong: Sequence[float]) -> str:
    """Right prefixes that pass over wrong ones that pass, at every threshold."""
    points = ["20,220"]
    for threshold in sorted({*right, *wrong}, reverse=True):
        x, y = (sum(s >= threshold for s in of) / len(of) for of in (wrong, right))
        points.append(f"{20 + 300 * x:.1f},{220 - 200 * y:.1f}")
    return (
        '<svg width="420" height="250"><path d="M20 20V220H320" stroke="#999" '
        f'fill="none"/><polyline points="{" ".join(points)}" stroke="#48c" fill="none" '
        'stroke-width="2"/><text x="20" y="14">right prefixes that pass</text>'
        '<text x="130" y="240">wrong prefixes that pass</text></svg>'
    )


def table(rows: Sequence[Sequence[object]]) -> str:
    cells = ("".join(tag("td", cell) for cell in row) for row in rows)
    return f"<table>{''.join(f'<tr>{row}</tr>' for row in cells)}</table>"


def tag(name: str, text: object) -> str:
    if isinstance(text, tuple):
        text = " to ".join(f"{end:.1f}" for end in text)
    return f"<{name}>{escape(str(text))}</{name}>"
