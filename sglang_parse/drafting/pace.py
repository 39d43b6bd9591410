"""How many tokens a head guesses for the draft model, by measured time; pure.

Costs and agreement hang on how many requests draft at once, so each load of twice as
many has a choice of its own.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

# Guesses of a request in a step: as many as published heads are right about in a row,
# one, which takes no step of the head beside the one that reads, and none.
LENGTHS = (4, 1, 0)
LONGEST = LENGTHS[0]
# Phases of a trial. The first is not counted: its texts are new to the head.
TRIAL = 6
# Phases of a length that its speed is a mean of.
MEMORY = 32
# Phases between trials, of another length each time: these take 0.4% of the phases.
PERIOD = 1500


class Pace:
    """The fastest length of the head's chains, load by load."""

    def __init__(self) -> None:
        self._loads: dict[int, _Load] = {}

    def choose(self, num_lanes: int) -> int:
        """Guesses of each lane in a step of a phase of so many lanes."""
        return self._load(num_lanes).choose()

    def note(self, num_lanes: int, most: int, num_tokens: int, seconds: float) -> None:
        """A phase has written so many tokens. most: what was chosen for it."""
        self._load(num_lanes).note(most, num_tokens, seconds)

    def _load(self, num_lanes: int) -> _Load:
        return self._loads.setdefault(num_lanes.bit_length(), _Load())


class _Load:
    def __init__(self) -> None:
        self._phases: dict[int, deque[tuple[int, float]]] = {
            length: deque(maxlen=MEMORY) for length in LENGTHS
        }
        self._begin(LENGTHS)
        self._num_since = self._turn = 0

    def _begin(self, lengths: Sequence[int]) -> None:
        """Try these lengths, one after the other."""
        self._trial = deque(length for length in lengths for _ in range(TRIAL))
        self._is_new = True

    def choose(self) -> int:
        return self._trial[0] if self._trial else max(LENGTHS, key=self._speed)

    def note(self, most: int, num_tokens: int, seconds: float) -> None:
        if not self._is_new:
            self._phases[most].append((num_tokens, seconds))
        if not self._trial:
            self._num_since += 1
            if self._num_since >= PERIOD:
                self._num_since, best = 0, self.choose()
                others = [length for length in LENGTHS if length != best]
                self._turn += 1
                self._begin(others[self._turn % 2 :][:1])
            return
        self._trial.popleft()
        self._is_new = bool(self._trial) and self._trial[0] != most

    def _speed(self, most: int) -> float:
        """Tokens a second."""
        phases = self._phases[most]
        return sum(num for num, _ in phases) / max(1e-9, sum(s for _, s in phases))
