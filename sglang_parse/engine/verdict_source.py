"""Where the verdicts of a round come from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from sglang_parse.engine.outcome import suffix_verdict
from sglang_parse.requests.round_records import Round

Scores = tuple[float, ...]


class VerdictSource(Protocol):
    """What the engine calls at four points of a round."""

    def open(self, round: Round) -> None:
        """Before the plan: fill `rows_per_verdict`."""

    def choose(self, round: Round, *, room: int) -> None:
        """The end of segmenting: say which boundaries get no suffix (`segments`).
        room: rows for suffixes."""

    def read(self, round: Round) -> list[Scores]:
        """After the pass: scores that need no suffix. Per request, a score for each
        boundary, or none. All ranks use those of the first rank."""

    def settle(
        self, round: Round, suffixes: Sequence[Scores], read: Sequence[Scores]
    ) -> None:
        """Fill `verdict` of each request.

        suffixes, read: per request, the scores of its judge suffixes and what `read`
        gave, both of the first rank.
        """


class SuffixVerdicts:
    """Every boundary has a judge suffix in the pass."""

    def open(self, round: Round) -> None: ...

    def choose(self, round: Round, *, room: int) -> None: ...

    def read(self, round: Round) -> list[Scores]:
        return [()] * len(round)

    def settle(
        self, round: Round, suffixes: Sequence[Scores], read: Sequence[Scores]
    ) -> None:
        for r, scores in zip(round, suffixes, strict=True):
            r.verdict = suffix_verdict(scores)
