"""How often a way to run rounds that does not pay is tried again; pure."""

from __future__ import annotations

from dataclasses import dataclass

# Share of the time that trials may lose, and the longest wait for one in milliseconds.
TRIAL_SHARE, LONGEST_WAIT_MS = 0.01, 300_000.0
# Each trial in a row that is lost doubles the wait, up to so many times what it was,
# and up to so many milliseconds.
MOST_LONGER, LONGER_MS = 8, 60_000.0
# How much faster another way has to look before it is taken.
MARGIN = 1.05


@dataclass
class Trials:
    """When the next trial is due, so that trials lose `TRIAL_SHARE` of the time."""

    due_ms: float = 0.0
    longer: int = 1

    def is_due(self, now_ms: float) -> bool:
        return now_ms >= self.due_ms

    def charge(self, now_ms: float, lost_ms: float) -> None:
        least_ms = min(max(0.0, lost_ms) / TRIAL_SHARE, LONGEST_WAIT_MS)
        wait_ms = max(least_ms, min(self.longer * least_ms, LONGER_MS))
        self.due_ms = max(self.due_ms, now_ms + wait_ms)
        self.longer = min(2 * self.longer, MOST_LONGER)

    def won(self) -> None:
        """What was tried pays."""
        self.longer = 1
