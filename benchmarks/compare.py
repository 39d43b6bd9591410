"""Do two runs of one benchmark agree? python -m benchmarks.compare FOLDER FOLDER

Each folder holds the summary.json of `sglang-parse bench`. Every ratio to the target
must be within a share of the other run's, and of two accuracies one within the other's
95% interval.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Of two runs on one 2-core machine that is not shared at the time; README, "All arms".
# Settings answer fewer problems than arms, and no target takes turns with them.
ARMS_WITHIN = 25.0
SETTINGS_WITHIN = 35.0

Key = tuple[str, str, str, int]
Figures = Mapping[str, Any]


def read_figures(folder: Path) -> dict[Key, Figures]:
    """By arm, options, data set, concurrency.

    Raises: SystemExit where there is no summary of a bench run.
    """
    try:
        figures = json.loads((folder / "summary.json").read_text())["figures"]
        return {
            (f["arm"], f["options"], f["dataset"], f["concurrency"]): f for f in figures
        }
    except (OSError, ValueError, KeyError, TypeError) as e:
        raise SystemExit(
            f"{folder}: expected a folder with the summary.json of a finished "
            f"`sglang-parse bench` ({type(e).__name__}: {e})."
        ) from None


def change(first: Figures, second: Figures) -> float | None:
    """Of the answers/s ratio to the target, in % of the smaller one; None where one run
    has no ratio."""
    old, new = first["answer_ratio"], second["answer_ratio"]
    if not old or not new:
        return None
    return 100 * (max(old[0], new[0]) / min(old[0], new[0]) - 1)


def same_accuracy(first: Figures, second: Figures) -> bool:
    """Whether one run's accuracy lies in the other's interval (that of 200 of 200 right
    holds 199, not the other way round); ungraded arms agree."""
    one, other = first["figures"], second["figures"]
    if one["accuracy"] is None or other["accuracy"] is None:
        return one["accuracy"] == other["accuracy"]
    return (
        other["accuracy_low"] <= one["accuracy"] <= other["accuracy_high"]
        or one["accuracy_low"] <= other["accuracy"] <= one["accuracy_high"]
    )


def main(argv: list[str] | None = None) -> int:
    """Prints a line for each arm or setting; 1 where any of them is apart."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("first", type=Path)
    parser.add_argument("second", type=Path)
    parser.add_argument(
        "--arms", type=float, default=ARMS_WITHIN, help="%%, default: 25"
    )
    parser.add_argument(
        "--settings", type=float, default=SETTINGS_WITHIN, help="%%, default: 35"
    )
    args = parser.parse_args(argv)
    first, second = read_figures(args.first), read_figures(args.second)
    both = [key for key in first if key in second]
    if not both:
        raise SystemExit(f"{args.first} and {args.second} have no arm in common.")
    num_apart, largest = 0, {False: 0.0, True: 0.0}
    for key in both:
        one, other = first[key], second[key]
        percent, is_sweep = change(one, other), bool(one["is_sweep"])
        if percent is not None:
            largest[is_sweep] = max(largest[is_sweep], percent)
        allowed = args.settings if is_sweep else args.arms
        apart = not same_accuracy(one, other) or (percent or 0.0) > allowed
        num_apart += apart
        shown = "no ratio" if percent is None else f"{percent:3.0f}% apart"
        print(
            f"{' '.join(str(part) for part in key if part)}: "
            f"{_ratio(one)} and {_ratio(other)} times the target, {shown}; right "
            f"{_right(one)} and {_right(other)}{'  <- APART' if apart else ''}"
        )
    num_alone = len(first) + len(second) - 2 * len(both)
    print(
        f"{len(both)} compared, {num_apart} apart; at most {largest[False]:.0f}% "
        f"between arms (allowed {args.arms:g}), {largest[True]:.0f}% between settings "
        f"({args.settings:g}). Only in one run: {num_alone}."
    )
    return 1 if num_apart else 0


def _ratio(figures: Figures) -> str:
    ratio = figures["answer_ratio"]
    return f"{ratio[0]:.2f}" if ratio else "-"


def _right(figures: Figures) -> str:
    accuracy = figures["figures"]["accuracy"]
    return "-" if accuracy is None else f"{100 * accuracy:.1f}%"


if __name__ == "__main__":
    sys.exit(main())
