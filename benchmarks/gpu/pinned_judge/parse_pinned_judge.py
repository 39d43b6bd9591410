"""A judge whose verdicts are random: for speed measurements with random weights.

A server finds it where this folder is on PYTHONPATH, as a package that offers an entry
point of `sglang_parse.judges` (docs/extending.md). A verdict passes with probability
1 - `parse_threshold`, so that each request chooses how much of its drafts is kept.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import torch

from sglang_parse.judging.prompt import build_judge_prompt
from sglang_parse.options.server import ParseConfig


class PinnedJudge:
    """Reads the default question, whose rows cost what they cost, and ignores it."""

    name = "pinned"

    def __init__(self) -> None:
        self._random = random.Random(0)

    def suffix(self, tokenizer: Any) -> Sequence[int]:
        """The suffix of the default question."""
        usual = ParseConfig()
        return build_judge_prompt(
            tokenizer, usual.judge_suffix, usual.verdict_pairs
        ).suffix

    def scores(self, logits: torch.Tensor) -> torch.Tensor:
        """Uniform in [0, 1): [n]. The first rank's scores hold for all ranks."""
        return torch.tensor([self._random.random() for _ in range(len(logits))])
