"""Settings, the measurements of each, and the choice among them. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import norm

from sglang_parse.calibrate.loss_bounds import loss_bound, tango_interval
from sglang_parse.options.server import ParseConfig


@dataclass(frozen=True)
class Setting:
    """Fields of ParseConfig that a request may set; None keeps the server's own.

    mode: always sent, because the server's own mode may be another.
    """

    threshold: float | None = None
    segmenter: str | None = None
    mode: str = "semantic"

    def fields(self) -> dict[str, Any]:
        """The set fields, as keys of the file for --speculative-parse-config."""
        return {k: v for k, v in vars(self).items() if v is not None}

    def custom_params(self) -> dict[str, Any]:
        """The set fields, as custom_params of a request, judged after a suffix."""
        found = {f"parse_{k}": v for k, v in self.fields().items()}
        return {**found, "parse_judge": "suffix"}

    @property
    def label(self) -> str:
        found = self.fields()
        if self.mode == "semantic" and len(found) > 1:
            del found["mode"]
        return ", ".join(f"{k}={v}" for k, v in found.items())


OFF, EXACT = Setting(mode="off"), Setting(mode="exact")


@dataclass(frozen=True)
class Outcome:
    """Per problem: whether the answer is right, and its seconds."""

    right: tuple[bool, ...]
    seconds: tuple[float, ...]


def both(one: Outcome, other: Outcome) -> Outcome:
    """Two measurements of the same problems: right if both are, at their mean time."""
    pairs = zip(one.seconds, other.seconds, strict=True)
    return Outcome(
        tuple(a and b for a, b in zip(one.right, other.right, strict=True)),
        tuple((a + b) / 2 for a, b in pairs),
    )


@dataclass(frozen=True)
class Trial:
    """One setting against target-only answers. loss: points of accuracy lost. bound:
    its upper bound at the requested confidence. ratio: answers per second relative to
    the same server's target alone (`parse_mode: off`)."""

    setting: Setting
    problems: int
    accuracy: float
    loss: float
    bound: float
    lost: int
    gained: int
    ratio: float


def compare(
    setting: Setting, outcome: Outcome, base: Outcome, confidence: float
) -> Trial:
    """outcome, base: of the same problems, of the setting and of the target alone."""
    pairs = list(zip(outcome.right, base.right, strict=True))
    lost = sum(theirs and not ours for ours, theirs in pairs)
    gained = sum(ours and not theirs for ours, theirs in pairs)
    return Trial(
        setting=setting,
        problems=len(pairs),
        accuracy=sum(outcome.right) / len(pairs),
        loss=100 * (lost - gained) / len(pairs),
        bound=loss_bound(lost, gained, len(pairs), confidence),
        lost=lost,
        gained=gained,
        ratio=sum(base.seconds) / sum(outcome.seconds),
    )


def candidates(
    screened: Sequence[Trial], *, budget: float, confidence: float, exact_ratio: float
) -> list[Setting]:
    """Settings to test, from the most cautious to the boldest: by the loss that the
    screening found, then by falling threshold.

    A setting is left out if its screening shows a loss over the budget, or if it is no
    faster than exact mode, the target alone, or a more cautious setting. Of equally
    cautious ones only the fastest is kept.
    """
    z = float(norm.ppf(confidence))
    fit = []
    for trial in screened:
        _, high = tango_interval(trial.gained, trial.lost, trial.problems, z)
        if -100 * high <= budget:
            fit.append(trial)
    found: list[Setting] = []
    fastest = max(1.0, exact_ratio)
    for _, group in itertools.groupby(sorted(fit, key=_boldness), key=_boldness):
        best = max(group, key=lambda t: t.ratio)
        if best.ratio > fastest:
            found.append(best.setting)
            fastest = best.ratio
    return found


def _boldness(trial: Trial) -> tuple[float, float]:
    value = trial.setting.threshold
    return max(0.0, trial.loss), -(ParseConfig.threshold if value is None else value)


def choose(
    settings: Sequence[Setting],
    test: Callable[[Setting], Trial],
    *,
    budget: float,
    floor: Trial,
) -> tuple[Trial, list[Trial]]:
    """Test `settings` in order until one is not shown to keep the budget.

    test: measures on problems that did not order the settings. floor: exact mode, which
    is the choice if no setting passes and is faster; the target alone is the choice if
    exact mode is slower. Returns the choice and all tests.
    """
    tests: list[Trial] = []
    alone = Trial(OFF, floor.problems, floor.accuracy + floor.loss / 100, 0, 0, 0, 0, 1)
    best = max(floor, alone, key=lambda t: t.ratio)
    for setting in settings:
        trial = test(setting)
        tests.append(trial)
        if trial.bound > budget:
            break
        if trial.ratio > best.ratio:
            best = trial
    return best, tests


@dataclass(frozen=True)
class Calibration:
    """screened: all settings on the screening problems, on which `floor` is exact mode.
    tested: those tested on fresh problems, exact mode first."""

    chosen: Trial
    screened: tuple[Trial, ...]
    tested: tuple[Trial, ...]
    floor: Trial
    reference: str
