"""Where the verdicts of a round come from."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from sglang_parse.engine.outcome import ScoreRows, suffix_scores, suffix_verdict
from sglang_parse.judging.judges import question_scores
from sglang_parse.options.extensions import ExtensionError
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
        """After the pass: scores on which all ranks have to agree."""

    def settle(self, round: Round, read: Sequence[Scores]) -> None:
        """Fill `verdict` of each request. read: what `read` gave on the first rank."""


class SuffixVerdicts:
    """Every boundary has a judge suffix in the pass.

    judge: scores verdict rows. on_error: told what it raises.
    """

    def __init__(
        self,
        judge: ScoreRows = question_scores,
        on_error: Callable[[ExtensionError], None] = lambda error: None,
    ) -> None:
        self.judge = judge
        self.on_error = on_error

    def open(self, round: Round) -> None: ...

    def choose(self, round: Round, *, room: int) -> None: ...

    def read(self, round: Round) -> list[Scores]:
        return suffix_scores(round, round.output.logits, self.judge, self.on_error)

    def settle(self, round: Round, read: Sequence[Scores]) -> None:
        for r, scores in zip(round, read, strict=True):
            r.verdict = suffix_verdict(scores)
