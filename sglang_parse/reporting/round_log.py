"""What the rounds since the last line of the log did, for the next line."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from sglang_parse.reporting.report import RoundRecord


@dataclass
class RoundLog:
    """Sums over the rounds of all requests; a round of one request counts once."""

    rounds: int = 0
    drafted: int = 0
    #: Draft tokens kept by verdict, and those that equal the target's own.
    by_verdict: int = 0
    agreed: int = 0
    verdicts: int = 0
    passed: int = 0
    not_judged: int = 0
    reason: str = ""

    def add(self, one: RoundRecord) -> None:
        """Count a round that had a draft."""
        self.drafted += sum(num for _, num in one.drafted_by) + one.num_client
        self.agreed += one.num_agreed
        self.by_verdict += one.num_kept - one.num_agreed
        self.verdicts += len(one.boundaries)
        self.passed += sum(b <= one.num_judged for b in one.boundaries)
        self.add_round(one.not_judged)

    def add_round(self, not_judged: str = "") -> None:
        """Count a round, and why it had no verdict although it might."""
        self.rounds += 1
        if not_judged:
            self.not_judged += 1
            self.reason = not_judged

    def line(self) -> str:
        """The line, "" if there was no round; what follows begins anew."""
        told = self._told() if self.rounds else ""
        vars(self).update(vars(RoundLog()))
        return told

    def _told(self) -> str:
        kept = f"drafted tokens: {self.drafted}"
        if self.drafted:
            share = (self.by_verdict + self.agreed) / self.drafted
            kept += f", kept: {share:.0%} (by verdict: "
            kept += f"{self.by_verdict / self.drafted:.0%}, equal to the target's own: "
            kept += f"{self.agreed / self.drafted:.0%})"
        told = f"{kept}, verdicts passed: {self.passed} of {self.verdicts}"
        if self.not_judged:
            told += f", rounds not judged: {self.not_judged} of {self.rounds}"
            told += f" ({self.reason})"
        return told


ROUND_LOG = RoundLog()
