"""Which drafter wrote the tokens of a draft, and how many of them were kept.

A run of tokens by one drafter is a pair (drafter's name, number of tokens).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

Run = tuple[str, int]


def first_tokens(runs: Iterable[Run], num: int) -> Iterator[Run]:
    """The runs of the first `num` tokens."""
    for name, length in runs:
        if num <= 0:
            return
        yield name, min(length, num)
        num -= length


def tokens_behind(runs: Iterable[Run], num: int) -> Iterator[Run]:
    """The runs of what comes behind the first `num` tokens."""
    for name, length in runs:
        if length > num:
            yield name, length - max(0, num)
        num -= length


@dataclass
class DrafterCounters:
    """Tokens of a request by drafter's name."""

    #: Tokens that were drafted.
    drafted: dict[str, int] = field(default_factory=dict)
    #: Of those, the tokens that stand in the output.
    kept: dict[str, int] = field(default_factory=dict)

    def add_drafted(self, runs: Iterable[Run]) -> None:
        _add(self.drafted, runs)

    def add_kept(self, runs: Iterable[Run], sign: int = 1) -> None:
        """sign: -1 takes them back."""
        _add(self.kept, runs, sign)

    def as_dict(self) -> dict[str, dict[str, int]]:
        """Drafters without a token are left out."""
        sums = {"drafted_by": self.drafted, "kept_by": self.kept}
        return {key: {k: n for k, n in by.items() if n} for key, by in sums.items()}


def _add(counts: dict[str, int], runs: Iterable[Run], sign: int = 1) -> None:
    for name, num in runs:
        if num:
            counts[name] = counts.get(name, 0) + sign * num
