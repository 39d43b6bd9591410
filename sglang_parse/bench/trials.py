"""Settings, what was measured of each, and the choice among them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from scipy.stats import norm

from sglang_parse.bench.stats import loss_bound, tango_interval
from sglang_parse.options.server import ParseConfig


@dataclass(frozen=True)
class Setting:
    """Fields of ParseConfig that a request may set; None keeps the server's own.

    mode: always said, so that a server of another mode serves what is tried.
    """

    threshold: float | None = None
    segmenter: str | None = None
    keep_rule: str | None = None
    judge_suffix: str | None = None
    mode: str = "semantic"
    #: `suffix`, `probe` or `auto`, on a server with a probe.
    judge: str | None = None
    probe_cutoff: float | str | None = None
    probe_band: float | str | None = None

    def fields(self) -> dict[str, Any]:
        """What is set, as keys of the file for --speculative-parse-config.

        The probe itself is a setting of the server (`with_judge`).
        """
        found = {k: v for k, v in vars(self).items() if k != "judge"}
        return {k: v for k, v in found.items() if v is not None}

    def with_judge(self, served: Mapping[str, Any]) -> dict[str, Any]:
        """The server's settings with the probe that this one uses, or without one."""
        found = dict(served)
        if self.judge == "suffix":
            found = {k: v for k, v in found.items() if not k.startswith("probe")}
        elif self.judge == "probe":
            found["probe_band"] = 0.0
        return found

    def options(self) -> dict[str, Any]:
        """The same as custom_params of a request."""
        found = {f"parse_{k}": v for k, v in self.fields().items()}
        return found | ({"parse_judge": self.judge} if self.judge else {})

    @property
    def label(self) -> str:
        found = self.fields() | ({"judge": self.judge} if self.judge else {})
        if self.mode == "semantic" and len(found) > 1:
            del found["mode"]
        return ", ".join(f"{k}={v}" for k, v in found.items())


OFF, EXACT = Setting(mode="off"), Setting(mode="exact")


@dataclass(frozen=True)
class Outcome:
    """Answers of one setting, item by item: whether right, and seconds."""

    right: tuple[bool, ...]
    seconds: tuple[float, ...]


def both(one: Outcome, other: Outcome) -> Outcome:
    """Two measurements of the same items: right if both are, at their mean time."""
    pairs = zip(one.seconds, other.seconds, strict=True)
    return Outcome(
        tuple(a and b for a, b in zip(one.right, other.right, strict=True)),
        tuple((a + b) / 2 for a, b in pairs),
    )


@dataclass(frozen=True)
class Trial:
    """One setting against target-only answers. loss: points of accuracy lost; bound:
    upper bound of it at the confidence asked for. ratio: answers per second over those
    of the same server's target alone (`parse_mode: off`)."""

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
    """outcome, base: of the same items."""
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
    """Settings worth testing, from the most cautious to the boldest: by the loss that
    screening found, and by threshold where it found the same.

    Those whose screening shows a loss over the budget are out, and so are those no
    faster than exact mode or the target alone. Of equally cautious ones the fastest is
    kept, and only if it is faster than every more cautious one.
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
    """Test `settings` in order while each is shown to keep to the budget.

    test: measures on problems that did not choose the settings. floor: exact mode, the
    choice if none passes or none is faster; the target alone is where that is slower.
    Returns the choice and all tests.
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
    """screened: the whole sweep on the screening problems, where `floor` is exact
    mode. tested: on fresh ones, exact mode first."""

    chosen: Trial
    screened: tuple[Trial, ...]
    tested: tuple[Trial, ...]
    floor: Trial
    reference: str
