"""Plots of a run as SVG files, drawn with matplotlib."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

from benchmarks.harness.cells import options_label  # noqa: E402
from benchmarks.harness.stats import reliability, roc_points  # noqa: E402
from benchmarks.harness.summary import BASELINE, Figures, Ratio  # noqa: E402

# The same figures give the same file.
matplotlib.rcParams.update({"svg.hashsalt": "sglang-parse", "svg.fonttype": "none"})
METADATA: dict[str, Any] = {"Date": None}


def write_plots(folder: Path, figures: Sequence[Figures]) -> list[str]:
    """Draw what there are figures for; returns the file names."""
    names = []
    main = [f for f in figures if not f.is_sweep]
    sweep = [f for f in figures if f.is_sweep]
    for dataset in dict.fromkeys(f.dataset for f in main):
        rows = [f for f in main if f.dataset == dataset]
        if any(f.answer_ratio for f in rows):
            names.append(_save(folder, f"speedup-{dataset}", speedup_plot(rows)))
        names.append(_save(folder, f"latency-{dataset}", time_plot(rows)))
    if any(f.answer_ratio for f in sweep):
        names.append(_save(folder, "sweep", sweep_plot(sweep)))
    judged = [f for f in main if f.judge and f.judge.auc is not None]
    if judged:
        names.append(_save(folder, "judge", judge_plot(judged)))
    return names


def _save(folder: Path, name: str, figure: Any) -> str:
    figure.tight_layout()
    figure.savefig(folder / f"{name}.svg", metadata=METADATA)
    plt.close(figure)
    return f"{name}.svg"


def speedup_plot(rows: Sequence[Figures]) -> Any:
    """Answers per second over the target's, by concurrency; whiskers: see spread."""
    figure, axes = plt.subplots(figsize=(8, 4.5))
    arms = [a for a in dict.fromkeys(f.arm for f in rows) if a != BASELINE]
    levels = sorted({f.concurrency for f in rows})
    width = 0.8 / len(levels)
    for k, concurrency in enumerate(levels):
        for place, arm in enumerate(arms):
            for f in rows:
                if (f.arm, f.concurrency) != (arm, concurrency) or not f.answer_ratio:
                    continue
                ratio, low, high = spread(f.answer_ratio, f.ratio_by_repeat)
                axes.bar(
                    place + (k - (len(levels) - 1) / 2) * width,
                    ratio,
                    width,
                    yerr=[[ratio - low], [high - ratio]],
                    color=f"C{k}",
                    capsize=2,
                )
    axes.axhline(1, color="black", linewidth=0.8)
    axes.set_xticks(range(len(arms)), arms, rotation=30, ha="right")
    axes.set_ylabel("answers/s over the target's")
    handles = [plt.Rectangle((0, 0), 1, 1, color=f"C{k}") for k in range(len(levels))]
    axes.legend(handles, [f"concurrency {c}" for c in levels])
    return figure


def spread(ratio: Ratio, by_repeat: Sequence[float]) -> Ratio:
    """The interval over items, wide enough to hold every repeat."""
    value, low, high = ratio
    return value, min([low, *by_repeat]), max([high, *by_repeat])


def time_plot(rows: Sequence[Figures]) -> Any:
    """Distributions of latency and of time to first token, by concurrency."""
    levels = sorted({f.concurrency for f in rows})
    figure, grid = plt.subplots(
        len(levels), 2, figsize=(9, 3.2 * len(levels)), squeeze=False
    )
    for line, concurrency in zip(grid, levels, strict=True):
        for axes, name, title in zip(
            line,
            ("latencies", "ttfts"),
            ("latency", "time to first token"),
            strict=True,
        ):
            for k, f in enumerate(r for r in rows if r.concurrency == concurrency):
                values = sorted(getattr(f, name))
                shares = [(i + 1) / len(values) for i in range(len(values))]
                style = "-" if k < 10 else "--"
                axes.plot(values, shares, label=f.arm, color=f"C{k % 10}", ls=style)
            axes.set_xscale("log")
            axes.set_xlabel(f"{title}, s")
            axes.set_ylabel("share of requests")
            axes.set_title(f"concurrency {concurrency}")
        line[1].legend(fontsize="xx-small")
    return figure


def sweep_plot(rows: Sequence[Figures]) -> Any:
    """Accuracy against speed: a line per granularity, its points the thresholds."""
    figure, axes = plt.subplots(figsize=(8, 5))
    lines: dict[str, list[tuple[float, Figures]]] = {}
    for f in rows:
        others = {k: v for k, v in f.asked.items() if k != "parse_threshold"}
        threshold = float(f.asked.get("parse_threshold", math.nan))
        label = options_label(others) or "server's own"
        lines.setdefault(label, []).append((threshold, f))
    for label, points in lines.items():
        points.sort(key=lambda p: p[0])
        xs = [f.answer_ratio[0] for _, f in points if f.answer_ratio]
        ys = [100 * f.figures.accuracy for _, f in points if f.answer_ratio]
        axes.plot(xs, ys, marker="o", label=label)
        for (threshold, _), x, y in zip(points, xs, ys, strict=True):
            axes.annotate(json.dumps(threshold), (x, y), fontsize="x-small")
    axes.set_xlabel("answers/s over the target's")
    axes.set_ylabel("right answers, %")
    axes.legend(fontsize="small")
    return figure


def judge_plot(rows: Sequence[Figures]) -> Any:
    """ROC of the verdicts and how far scores are probabilities."""
    figure, (roc, bins) = plt.subplots(1, 2, figsize=(9, 4.2))
    lowest: dict[str, Figures] = {}
    for f in sorted(rows, key=lambda f: -f.concurrency):
        lowest[f.arm] = f
    for f in sorted(lowest.values(), key=rows.index):
        points = roc_points(f.scores, f.valid)
        roc.step([p[1] for p in points], [p[2] for p in points], label=f.arm)
        rows_ = reliability(f.scores, f.valid)
        bins.plot([r[0] for r in rows_], [r[1] for r in rows_], marker="o", label=f.arm)
    roc.set_xscale("symlog", linthresh=1e-3)
    roc.set_xlabel("invalid prefixes accepted")
    roc.set_ylabel("valid prefixes accepted")
    bins.plot([0, 1], [0, 1], color="black", linewidth=0.8)
    bins.set_xlabel("score")
    bins.set_ylabel("share of prefixes that are valid")
    bins.legend(fontsize="x-small")
    return figure
