"""The page of `python -m benchmarks.report`: text, tables and three plots. Pure."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from benchmarks.harness.stats import (  # noqa: E402
    roc_auc,
    roc_points,
    wilson_interval,
)

ALONE, SERVED = "target alone", "as served"
THIRDS = ("first third", "second third", "last third")
EXAMPLES = 5
STYLE = """body { font: 16px/1.5 sans-serif; max-width: 60em; margin: 2em auto }
table { border-collapse: collapse } td, th { padding: .2em .8em; text-align: left }
tr { border-bottom: 1px solid #ccc } pre { background: #f4f4f4; padding: .5em;
white-space: pre-wrap } svg { max-width: 100% }"""
Rows = Sequence[Sequence[object]]
SPEED = (
    "",
    "right, 95% interval",
    "became wrong",
    "became right",
    "tok/s",
    "over the target alone, by turn",
    "latency p50, p95",
    "first token p95",
    "target passes per answer",
)
DRIFT = (
    "",
    "tokens per answer",
    "lines",
    "with lists, headings or code",
    "equal to the target's, token by token",
    "scripts of its letters",
)


def report_page(figures: Mapping[str, Any]) -> str:
    """The whole page. figures: as `benchmarks.report` collects them."""
    threshold = figures["settings"]["threshold"]
    valid, wrong = verdicts(figures["planted"])
    parts = [
        f"<h1>PARSE: {escape(figures['target'])}</h1>",
        paragraph(
            f"Draft: {figures['draft'] or 'no draft model'}. Questions: "
            f"{figures['questions']}, {figures['arms'][ALONE]['problems']} of them, "
            f"{figures['arms'][ALONE]['concurrency']} at a time. An answer is right if "
            f"it agrees with {figures['right_by']}. {verdict(figures['arms'][SERVED])}"
        ),
        "<h2>Speed and accuracy</h2>",
        table(SPEED, [speed_row(a, f) for a, f in figures["arms"].items()]),
        plot(speed_plot, figures["arms"]),
        "<h2>What became of the drafts</h2>",
        table(("", ""), acceptance(figures["counts"])),
        "<h2>The judge</h2>",
        paragraph(
            "Right answers of the target were cut behind a line that had been made "
            "wrong. Such errors are not those of a draft, so these figures say what "
            "the judge can see, and not how often it errs in use. The server's "
            f"threshold is {threshold:g}."
        ),
        table(("", "prefixes", "passed", "95% interval"), false_accepts(figures)),
        plot(roc_plot, valid, wrong) if valid and wrong else "",
        "<h2>Drift</h2>",
        table(DRIFT, [drift_row(a, f["drift"]) for a, f in figures["arms"].items()]),
        paragraph("Mean log-probability of a token under the target:"),
        table(("tokens", "mean"), list(figures["logprob"].items())),
        "<h2>Answers that became wrong</h2>",
        paragraph(f"{len(figures['worse'])} in all."),
        *(pre(row.values()) for row in figures["worse"][:EXAMPLES]),
        "<h2>Wrong lines that passed</h2>",
        *(
            pre(["".join(p["lines"]), f"instead of: {p['was']}"])
            for p in [p for p in figures["planted"] if p["scores"][-1] >= threshold][
                :EXAMPLES
            ]
        ),
    ]
    data = json.dumps(figures, indent=1).replace("</", "<\\/")
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>PARSE report'
        f"</title><style>{STYLE}</style>{''.join(parts)}"
        f'<script type="application/json" id="figures">{data}</script></html>\n'
    )


def verdict(served: Mapping[str, Any]) -> str:
    """One sentence on equivalence, at the margin given before the run."""
    found, margin = served["equivalence"], served["equivalence"]["margin"]
    said = "are" if found["is_shown"] else "are not shown to be"
    points = "point" if margin == 1 else "points"
    return (
        f"Answers as served {said} right as often as the target's to within "
        f"{margin:g} {points}: the change lies above {found['low']:.1f} and below "
        f"{found['high']:.1f} points, each at 95% (two one-sided tests)."
    )


def speed_row(arm: str, f: Mapping[str, Any]) -> list[object]:
    low, high = (f"{100 * f[f'accuracy_{end}']:.1f}" for end in ("low", "high"))
    return [
        arm,
        f"{100 * f['accuracy']:.1f}% ({low} to {high})",
        f["lost"],
        f["gained"],
        f"{f['output_tok_s']:.0f}",
        "  ".join(f"{ratio:.2f}x" for ratio in f["ratios"]),
        f"{f['latency_p50_s']:.2f}, {f['latency_p95_s']:.2f} s",
        f"{f['ttft_p95_s']:.2f} s",
        f"{f['passes_per_answer']:.1f}",
    ]


def acceptance(counts: Mapping[str, int]) -> Rows:
    """Rows about the sums of the reports' counters."""
    drafted = counts.get("draft_tokens", 0) + counts.get("eagle_draft_tokens", 0)
    kept, matched = counts.get("kept_tokens", 0), counts.get("matched_tokens", 0)
    judged = counts.get("judged_segments", 0)
    return [
        ("drafted tokens", drafted),
        ("of them in the answer", share(kept, drafted)),
        ("let stand by a verdict", share(kept - matched, drafted)),
        ("equal to the target's own", share(matched, drafted)),
        ("verdicts", judged),
        ("of them before the cut", share(counts.get("kept_segments", 0), judged)),
        ("tokens by the target", counts.get("written_tokens", 0)),
    ]


def verdicts(planted: Sequence[Mapping[str, Any]]) -> tuple[list[float], list[float]]:
    """Scores of right prefixes, each counted once, and of the first wrong ones."""
    right = {(p["item"], k): s for p in planted for k, s in enumerate(p["scores"][:-1])}
    return list(right.values()), [p["scores"][-1] for p in planted]


def false_accepts(figures: Mapping[str, Any]) -> Rows:
    threshold, planted = figures["settings"]["threshold"], figures["planted"]
    valid, wrong = verdicts(planted)
    groups = {"right prefixes": valid, "wrong ones": wrong}
    for kind in dict.fromkeys(p["kind"] for p in planted):
        rows = [p for p in planted if p["kind"] == kind]
        groups[f"wrong: {kind}"] = [p["scores"][-1] for p in rows]
    for place, name in enumerate(THIRDS):
        rows = [p for p in planted if p["third"] == place]
        groups[f"wrong in the {name} of the answer"] = [p["scores"][-1] for p in rows]
    lines = []
    for name, scores in groups.items():
        passed = sum(s >= threshold for s in scores)
        low, high = wilson_interval(passed, len(scores))
        interval = f"{100 * low:.1f}% to {100 * high:.1f}%"
        lines.append((name, len(scores), share(passed, len(scores)), interval))
    return lines


def drift_row(arm: str, f: Mapping[str, Any]) -> list[object]:
    scripts = ", ".join(f"{k.title()} {100 * v:.1f}%" for k, v in f["scripts"].items())
    return [
        arm,
        f"{f['tokens']:.1f}",
        f"{f['lines']:.1f}",
        f"{100 * f['markup']:.1f}%",
        f"{100 * f['identical']:.1f}%",
        scripts,
    ]


def share(part: float, whole: float) -> str:
    return f"{part:g} of {whole:g} ({100 * part / whole:.1f}%)" if whole else "none"


def speed_plot(axes: Any, arms: Mapping[str, Any]) -> None:
    for place, figures in enumerate(arms.values()):
        ratios = figures["ratios"]
        axes.barh(place, sum(ratios) / len(ratios), color=f"C{place}")
        axes.plot(ratios, [place] * len(ratios), "k|")
    axes.set_yticks(range(len(arms)), list(arms))
    axes.set_xlabel("speed over the target alone; a mark for each turn")


def roc_plot(axes: Any, valid: Sequence[float], wrong: Sequence[float]) -> None:
    scores, gold = [*valid, *wrong], [True] * len(valid) + [False] * len(wrong)
    points = roc_points(scores, gold)
    axes.step([p[1] for p in points], [p[2] for p in points], where="post")
    axes.set_xlabel("wrong prefixes that pass")
    axes.set_ylabel("right prefixes that pass")
    axes.set_title(f"area under the curve: {roc_auc(scores, gold):.3f}")


def plot(draw: Any, *data: Any) -> str:
    """An SVG element; the same data give the same text."""
    with matplotlib.rc_context({"svg.hashsalt": "report", "svg.fonttype": "none"}):
        figure, axes = plt.subplots(figsize=(7, 3))
        draw(axes, *data)
        figure.tight_layout()
        file = io.StringIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
        plt.close(figure)
    text = file.getvalue()
    return text[text.index("<svg") :]


def table(columns: Sequence[str], rows: Rows) -> str:
    lines = [("th", columns), *(("td", row) for row in rows)]
    return "<table>{}</table>".format(
        "".join(
            "<tr>{}</tr>".format(
                "".join(f"<{tag}>{escape(cell(c))}</{tag}>" for c in line)
            )
            for tag, line in lines
        )
    )


def cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else str(value)


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def pre(texts: Any) -> str:
    return "".join(f"<pre>{escape(text)}</pre>" for text in texts) + "<hr>"
