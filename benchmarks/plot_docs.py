"""The two speed plots of the documents, drawn from the stored results.

    python -m benchmarks.plot_docs --out docs/assets

`speed.svg` shows modes by concurrency (results/modes.jsonl), `arms.svg` every arm at
concurrency 1 and 8 (results/embedded and results/embedded_rerun).
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402

RESULTS = Path(__file__).parent / "results"
LINES = {
    "semantic": "PARSE",
    "exact": "PARSE in exact mode",
    "hostile": "PARSE, useless draft",
}
BARS = {
    "draft": "draft alone (75% right)",
    "parse": "PARSE",
    "parse-eagle3": "PARSE + EAGLE-3",
    "eagle3": "EAGLE-3 alone",
    "sequential-server": "one step judged a pass",
    "cascade": "cascade",
    "sequential": "steps checked by a client",
    "exact": "exact mode, same draft",
}
#: Mean, lowest and highest.
Range = tuple[float, float, float]
# The same figures give the same file.
matplotlib.rcParams.update({"svg.hashsalt": "sglang-parse", "svg.fonttype": "none"})


def span(values: list[float]) -> Range:
    return sum(values) / len(values), min(values), max(values)


def modes_by_concurrency(path: Path) -> dict[str, dict[int, Range]]:
    """Arm -> concurrency -> output tok/s over the target's, over repeats."""
    ratios: dict[str, dict[int, list[float]]] = {arm: {} for arm in LINES}
    for line in path.read_text(encoding="utf-8").splitlines():
        row = json.loads(line)
        if row["arm"] in ratios:
            found = ratios[row["arm"]].setdefault(row["concurrency"], [])
            found.append(row["ratio"])
    return {arm: {c: span(v) for c, v in by.items()} for arm, by in ratios.items()}


def arms_at(concurrency: int, folders: list[Path]) -> dict[str, Range]:
    """Arm -> answers/s over the target's, over runs."""
    ratios: dict[str, list[float]] = {arm: [] for arm in BARS}
    for folder in folders:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        for row in summary["figures"]:
            is_shown = row["arm"] in ratios and not row["is_sweep"]
            if is_shown and row["concurrency"] == concurrency:
                ratios[row["arm"]].append(row["answer_ratio"][0])
    return {arm: span(values) for arm, values in ratios.items()}


def draw_modes(modes: Mapping[str, Mapping[int, Range]]) -> Any:
    """Lines over concurrency; a band from the lowest repeat to the highest."""
    figure, axes = plt.subplots(figsize=(8, 3.6))
    for k, (arm, label) in enumerate(LINES.items()):
        levels = sorted(modes[arm])
        means, lows, highs = zip(*(modes[arm][c] for c in levels), strict=True)
        axes.plot(levels, means, marker="o", color=f"C{k}", label=label)
        axes.fill_between(levels, lows, highs, color=f"C{k}", alpha=0.2)
    axes.axhline(1, color="black", linewidth=0.8, linestyle="--", label="target alone")
    axes.set_xscale("log", base=2)
    axes.set_xticks(levels, [str(c) for c in levels])
    axes.set_ylim(bottom=0)
    axes.set_xlabel("requests in flight")
    axes.set_ylabel("output tok/s over the target's")
    axes.legend(frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def draw_arms(by_concurrency: Mapping[int, Mapping[str, Range]]) -> Any:
    """Horizontal bars; whiskers from the lower run to the higher."""
    figure, axes = plt.subplots(figsize=(8, 4.4))
    for k, (concurrency, arms) in enumerate(by_concurrency.items()):
        means, lows, highs = zip(*(arms[arm] for arm in BARS), strict=True)
        places = [i + (k - 0.5) * 0.4 for i in range(len(BARS))]
        below = [m - x for m, x in zip(means, lows, strict=True)]
        above = [x - m for m, x in zip(means, highs, strict=True)]
        axes.barh(
            *(places, means, 0.4),
            xerr=[below, above],
            color=f"C{k}",
            capsize=2,
            label=f"{concurrency} in flight",
        )
    axes.axvline(1, color="black", linewidth=0.8, linestyle="--")
    axes.set_yticks(range(len(BARS)), list(BARS.values()))
    axes.invert_yaxis()
    axes.set_xlabel("answers/s over the target's")
    axes.legend(frameon=False, loc="lower right")
    axes.spines[["top", "right"]].set_visible(False)
    return figure


def save(figure: Any, path: Path) -> None:
    figure.tight_layout()
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, metavar="FOLDER")
    out: Path = parser.parse_args().out
    save(draw_modes(modes_by_concurrency(RESULTS / "modes.jsonl")), out / "speed.svg")
    runs = [RESULTS / "embedded", RESULTS / "embedded_rerun"]
    save(draw_arms({c: arms_at(c, runs) for c in (1, 8)}), out / "arms.svg")


if __name__ == "__main__":
    main()
