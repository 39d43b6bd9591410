"""How good made-up drafts are: errors, agreement and segments, token by token.

A token of the simulator says what became of it: it is what the target would write, or
differs and is valid, or makes everything behind it invalid.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from sglang_parse.cli import estimate

# Token ids: twice the kind, plus one where a segment ends behind it.
AGREES, DIFFERS, WRONG, TARGETS_OWN = range(4)
STOP = 8
TOKEN_TEXTS = [*(t for _ in range(4) for t in ("w ", "w\n")), "", ""]
# How much more often drafts of a hard request are wrong.
HARDER = 20

error_rate = lru_cache(estimate.error_rate)


@dataclass(frozen=True)
class Drafts:
    """What the draft model writes.

    kept: share of a draft of 256 tokens that verdicts keep. agreement: chance that a
    valid token is the target's own. segments: shortest and longest, evenly spread.
    own_words: chance that a segment which the draft model begins itself is in other
    words than the target's; where the target wrote the beginning, it goes on like that.
    hard: share of requests in which errors are `HARDER` times as frequent.
    tokens_a_step: that the draft model writes on average, more than one by guesses.
    """

    kept: float = 0.9
    agreement: float = 0.8
    segments: tuple[int, int] = (20, 60)
    own_words: float = 0.0
    hard: float = 0.0
    tokens_a_step: float = 1.0

    def error_rate(self, *, is_hard: bool = False) -> float:
        """Errors a token."""
        rate = error_rate(self.kept)
        return min(1.0, HARDER * rate) if is_hard else rate

    def segment_len(self, rng: random.Random) -> int:
        return rng.randint(*self.segments)

    def kinds(
        self, rng: random.Random, begins: Sequence[bool], rate: float
    ) -> list[int]:
        """Kinds of new draft tokens. begins: whether each is the first of a segment."""
        kinds, in_own_words = [], False
        for is_first in begins:
            if is_first and self.own_words:
                in_own_words = rng.random() < self.own_words
            if rng.random() < rate:
                kinds.append(WRONG)
            elif in_own_words:
                kinds.append(DIFFERS)
            else:
                kinds.append(AGREES if rng.random() < self.agreement else DIFFERS)
        return kinds


HOSTILE = Drafts(kept=0.01, agreement=0.02)


@dataclass(frozen=True)
class Changing:
    """Drafts that change after so many milliseconds each, in turn."""

    parts: Sequence[Drafts]
    every_ms: float

    def at(self, ms: float) -> Drafts:
        return self.parts[int(ms / self.every_ms) % len(self.parts)]


def shifted(drafts: Drafts, **changes: float) -> Drafts:
    """The same with other values."""
    return replace(drafts, **changes)  # type: ignore[arg-type]
