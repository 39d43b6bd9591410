"""The report of a run: report.md with tables, summary.json, plots."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.cells import BASELINE, Cell
from benchmarks.harness.config import BenchConfig
from benchmarks.harness.stats import JudgeQuality
from benchmarks.harness.summary import Figures, Graded, Ratio, summarise_cells

DASH = "-"


def write_report(config: BenchConfig, graded: Sequence[Graded]) -> Path:
    """Write everything from the stored cells alone; returns the path of report.md."""
    figures = summarise_cells(graded, config.threshold)
    about = {arm.name: arm.about for arm in config.arms}
    plots: list[str] = []
    try:
        from benchmarks.harness.plots import write_plots
    except ImportError:
        note = "\nNo plots: matplotlib is missing (`pip install -e '.[bench]'`).\n"
    else:
        plots, note = write_plots(config.out, figures), ""
    origins = [one.result.provenance for one in graded]
    text = report_text(figures, about, origins) + note
    if names := out_of_turn(graded):
        text += (
            "\nMeasured when the run went on, at another time than the target that "
            f"they are compared with: {', '.join(names)}.\n"
        )
    text += "".join(f"\n![{Path(p).stem}]({p})\n" for p in plots)
    path = config.out / "report.md"
    path.write_text(text, encoding="utf-8")
    differing = ("load_average", "servers", "turns")  # from cell to cell
    stable = [{k: v for k, v in o.items() if k not in differing} for o in origins]
    distinct = [o for k, o in enumerate(stable) if o not in stable[:k]]
    summary = {"figures": [f.as_dict() for f in figures], "provenance": distinct}
    (config.out / "summary.json").write_text(
        json.dumps(summary, indent=1) + "\n", encoding="utf-8"
    )
    return path


def out_of_turn(graded: Sequence[Graded]) -> list[str]:
    """Cells that should have taken turns with the target they are compared with, and
    did not: of the two, one was measured when the other was there already."""

    def place(cell: Cell) -> tuple[Any, ...]:
        return cell.dataset, cell.concurrency, cell.repeat, cell.group

    def turns(one: Graded) -> Sequence[str]:
        return one.result.provenance.get("turns") or ()

    laps = [g for g in graded if g.cell.laps > 1 and not g.cell.is_sweep and turns(g)]
    bases = {place(g.cell): g for g in laps if g.cell.arm == BASELINE}
    return [
        one.cell.name
        for one in laps
        if (base := bases.get(place(one.cell)))
        and (base.cell.name not in turns(one) or one.cell.name not in turns(base))
    ]


def report_text(
    figures: Sequence[Figures],
    about: Mapping[str, str],
    origins: Sequence[Mapping[str, Any]],
) -> str:
    """All tables as Markdown."""
    main = [f for f in figures if not f.is_sweep]
    sweep = [f for f in figures if f.is_sweep]
    parts = [
        "# Benchmark report\n",
        "Ratios and differences are to the arm `target` on the same items. Answers/s "
        "ratio: of mean latencies, which at a fixed number of requests in flight is "
        "that of throughput while all places are taken (a set, or a part of it under "
        "`laps`, of fewer than five times as many items empties them too long: read "
        "its answers/s instead); with its "
        "95% paired bootstrap interval over items; behind it, where "
        "there are repeats, their lowest and highest ratio; all else is about means of "
        "items over repeats. Difference: in points, with the 95% score "
        "interval of paired shares and McNemar's exact p; over repeats the wider of "
        "the bootstrap's and that of items that were lost and gained.\n",
    ]
    for dataset, concurrency in dict.fromkeys((f.dataset, f.concurrency) for f in main):
        rows = [f for f in main if (f.dataset, f.concurrency) == (dataset, concurrency)]
        parts.append(f"## {dataset}, concurrency {concurrency}\n")
        parts.append(table(rows, SPEED_COLUMNS))
        parts.append(table(rows, TIME_COLUMNS))
        parts.append(table(rows, WORK_COLUMNS))
    judged = [f for f in main if f.judge]
    if judged:
        parts.append("## Judge against gold steps\n")
        parts.append(
            "Verdicts on prefixes of drafts. False accept: invalid prefixes that "
            "passed, of all and of those that are the first invalid one of their "
            "draft (behind it, first-failure has cut already). False reject: valid "
            "ones that failed. Behind a share, the exact upper bound at 95% "
            "confidence; invalid prefixes of a draft contain one another, so theirs is "
            "of the first alone. All of the first repeat.\n"
        )
        parts.append(table(judged, JUDGE_COLUMNS))
    if sweep:
        parts.append(
            f"## Settings of `{sweep[0].arm}`, concurrency {sweep[0].concurrency}\n"
        )
        parts.append(table(sweep, SWEEP_COLUMNS))
    parts.append("## Arms\n")
    parts.append("".join(f"- `{name}`: {text}\n" for name, text in about.items()))
    parts.append("## Measured with\n")
    parts.append(origin_text(origins))
    return "\n".join(parts)


Column = Callable[[Figures], str]


def table(rows: Iterable[Figures], columns: Mapping[str, Column]) -> str:
    """Markdown, one row per Figures."""
    lines = ["| " + " | ".join(columns) + " |", "|---" * len(columns) + "|"]
    for f in rows:
        lines.append("| " + " | ".join(show(f) for show in columns.values()) + " |")
    return "\n".join(lines) + "\n"


def _number(value: float | None, digits: int = 2) -> str:
    return DASH if value is None else f"{value:.{digits}f}"


def _percent(value: float | None, digits: int = 1) -> str:
    return DASH if value is None else f"{100 * value:.{digits}f}"


def _ratio(value: Ratio | None) -> str:
    return DASH if value is None else f"{value[0]:.2f} ({value[1]:.2f}-{value[2]:.2f})"


def _answer_ratio(f: Figures) -> str:
    repeats = f.ratio_by_repeat
    text = _ratio(f.answer_ratio)
    if len(repeats) > 1:
        text += f"; {min(repeats):.2f}-{max(repeats):.2f}"
    return text


def _difference(f: Figures) -> str:
    d = f.difference
    if d is None:
        return DASH
    return f"{d.points:+.1f} ({d.low:+.1f} to {d.high:+.1f}), p={d.mcnemar_p:.2g}"


def _right(f: Figures) -> str:
    if f.rating is not None:
        some = "" if f.share_rated == 1 else f" ({100 * f.share_rated:.0f}% of them)"
        return f"rated {f.rating:.2f}{some}"
    if not f.is_graded:
        return DASH
    s = f.figures
    low, high = _percent(s.accuracy_low), _percent(s.accuracy_high)
    return f"{_percent(s.accuracy)} ({low}-{high})"


def _quality(name: str, percent: bool = True) -> Column:
    def show(f: Figures) -> str:
        value = getattr(f.judge, name)
        return _percent(value) if percent else _number(value, 4)

    return show


def _bounded(f: Figures, name: str, bound: str) -> str:
    share = getattr(f.judge, name)
    if share is None:
        return DASH
    return f"{_percent(share)} (< {_percent(getattr(f.judge, bound))})"


def _counts(judge: JudgeQuality | None) -> str:
    if judge is None:
        return DASH
    return f"{judge.valid} / {judge.invalid} / {judge.first_invalid}"


def _arm(f: Figures) -> str:
    return f.arm


SPEED_COLUMNS: dict[str, Column] = {
    "arm": _arm,
    "right % (95%)": _right,
    "difference, points": _difference,
    "answers/s ratio": _answer_ratio,
    "tok/s ratio": lambda f: _ratio(f.token_ratio),
}
TIME_COLUMNS: dict[str, Column] = {
    "arm": _arm,
    "answers/s": lambda f: _number(f.figures.requests_s),
    "output tok/s": lambda f: _number(f.figures.output_tok_s, 0),
    "latency p50 / p95 s": lambda f: (
        f"{f.figures.latency_p50_s:.3f} / {f.figures.latency_p95_s:.3f}"
    ),
    "TTFT p50 / p95 s": lambda f: (
        f"{f.figures.ttft_p50_s:.3f} / {f.figures.ttft_p95_s:.3f}"
    ),
}
WORK_COLUMNS: dict[str, Column] = {
    "arm": _arm,
    "tokens/answer": lambda f: _number(f.tokens_per_answer, 1),
    "target passes/answer": lambda f: _number(f.figures.passes_per_answer),
    "accept length": lambda f: _number(f.accept_length),
    "draft tokens kept %": lambda f: _percent(f.kept_share),
}
JUDGE_COLUMNS: dict[str, Column] = {
    "arm": _arm,
    "concurrency": lambda f: str(f.concurrency),
    "valid / invalid / first invalid": lambda f: _counts(f.judge),
    "false accept %": _quality("false_accept"),
    "of first invalid %": lambda f: _bounded(
        f, "first_false_accept", "first_false_accept_high"
    ),
    "false reject %": lambda f: _bounded(f, "false_reject", "false_reject_high"),
    "ECE": _quality("ece", percent=False),
    "AUC": _quality("auc", percent=False),
}
SWEEP_COLUMNS: dict[str, Column] = {
    "options": lambda f: f.options.replace(",", ", "),
    "right % (95%)": _right,
    "difference, points": _difference,
    "answers/s ratio": _answer_ratio,
    "kept %": lambda f: _percent(f.kept_share),
    "passes/answer": lambda f: _number(f.figures.passes_per_answer),
    "false accept %": lambda f: _percent(f.judge.false_accept if f.judge else None),
    "false reject %": lambda f: _percent(f.judge.false_reject if f.judge else None),
}


def origin_text(origins: Sequence[Mapping[str, Any]]) -> str:
    """The distinct commits, versions, machines and servers of the cells."""

    def line(name: str, values: Iterable[Any]) -> str:
        return f"- {name}: {'; '.join(dict.fromkeys(map(json.dumps, values)))}\n"

    names = ("argv", "commit", "versions", "python", "cpu", "cpus", "gpus")
    lines = [line(name, (o.get(name) for o in origins)) for name in names]
    servers = [s for o in origins for s in o.get("servers", {}).values()]
    return "".join(lines) + (line("servers", servers) if servers else "")
