"""The options of a calibration, and the settings that it tries."""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sglang_parse.calibrate.trials import Setting
from sglang_parse.options.server import ParseConfig
from sglang_parse.options.validation import check_count

THRESHOLDS = (0.3, 0.5, 0.7, 0.9, 0.97)
SEGMENTERS = ("step", "paragraph", "fixed:32")


def problems_needed(budget: float, confidence: float) -> int:
    """Problems that bound a loss by `budget` points if no answer gets worse."""
    return math.ceil(math.log(1 - confidence) / math.log(1 - budget / 100))


@dataclass(frozen=True)
class CalibrateOptions:
    """prompts: their file, "" for the embedded task. screen: problems that order the
    settings. problems: fresh ones that test them."""

    url: str
    out: Path
    prompts: str = ""
    problems: int = 700
    screen: int = 100
    concurrency: int = 8
    budget: float = 0.5
    confidence: float = 0.95
    seed: int = 7
    max_new_tokens: int = 2048
    thresholds: tuple[float, ...] = THRESHOLDS
    segmenters: tuple[str, ...] = SEGMENTERS
    chat_template: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not 0 < self.budget < 100 or not 0.5 <= self.confidence < 1:
            raise ValueError(
                f"--budget {self.budget} and --confidence {self.confidence}: expected "
                "points above 0 and below 100, and a share from 0.5 to below 1."
            )
        for name in ("problems", "screen", "concurrency"):
            check_count(getattr(self, name), f"--{name}", 1, 1 << 20)
        needed = problems_needed(self.budget, self.confidence)
        if self.problems < needed:
            raise ValueError(
                f"--problems {self.problems} cannot show a loss of at most "
                f"{self.budget:g} points at confidence {self.confidence:g}, even "
                f"without one wrong answer; give at least {needed}, a larger --budget "
                "or a lower --confidence."
            )

    def settings(self) -> list[Setting]:
        """All settings to try. Raises ValueError on a value that PARSE refuses."""
        axes = (self.thresholds, self.segmenters)
        found = [Setting(*values) for values in itertools.product(*axes)]
        for setting in found:
            ParseConfig(**setting.fields())
        return found
