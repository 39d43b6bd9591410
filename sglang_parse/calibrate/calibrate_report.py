"""The files and the text that a calibration writes."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from sglang_parse.calibrate.calibrate_options import CalibrateOptions
from sglang_parse.calibrate.trials import Calibration, Trial


def write_files(
    options: CalibrateOptions, found: Calibration, served: Mapping[str, Any]
) -> None:
    """Write the setting for --speculative-parse-config and a report beside it.

    served: the server's own settings, see `served_settings`.
    """
    chosen = found.chosen.setting
    # A probe is bound to the settings that it was trained for.
    kept = {k: v for k, v in served.items() if not k.startswith("probe")}
    config = {**kept, **chosen.fields()}
    options.out.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    report = {
        "chosen": _trial_row(found.chosen),
        "reference": found.reference,
        **{
            name: getattr(options, name)
            for name in ("prompts", "seed", "concurrency", "url")
        },
        "served": served,
        "budget": options.budget,
        "confidence": options.confidence,
        "exact": _trial_row(found.floor),
        "screened": [_trial_row(t) for t in found.screened],
        "tested": [_trial_row(t) for t in found.tested],
    }
    path = options.out.with_suffix(".report.json")
    path.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


def _trial_row(trial: Trial) -> Mapping[str, Any]:
    return {**vars(trial), "setting": trial.setting.fields()}


def report_text(options: CalibrateOptions, found: Calibration) -> str:
    """Markdown: the screening, the tests on fresh problems, and the choice."""
    chosen = found.chosen
    parts = [
        f"Accuracy by {found.reference}; loss and bound in points against target-only "
        f"answers, bound at confidence {options.confidence:g}; ratio of answers/s.\n",
        "Screening:\n",
        _table([found.floor, *found.screened]),
        "On fresh problems:\n",
        _table(found.tested),
        f"Chosen: {chosen.setting.label}, {chosen.ratio:.2f}x the answers/s of the "
        "same server's target alone (parse_mode off); "
        f"start the server with --speculative-parse-config {options.out}. Measured at "
        f"concurrency {options.concurrency}; how much is judged depends on the load, "
        "so calibrate at the one you expect.",
    ]
    if chosen.setting.mode != "semantic":
        parts.append(
            "No semantic setting was shown to keep to the budget and to be faster; "
            f"{chosen.setting.mode} mode changes nothing. More --problems sharpen the "
            "test."
        )
    return "\n".join(parts)


def _table(trials: Sequence[Trial]) -> str:
    lines = [
        "| setting | problems | right % | loss | bound | ratio |",
        "|---" * 6 + "|",
    ]
    lines += [
        f"| {t.setting.label} | {t.problems} | {100 * t.accuracy:.1f} | {t.loss:+.2f} "
        f"| {t.bound:.2f} | {t.ratio:.2f} |"
        for t in trials
    ]
    return "\n".join(lines) + "\n"
