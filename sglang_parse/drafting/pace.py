"""How many tokens a head guesses for the draft model, by measured time; pure.

Costs and agreement hang on how many requests draft at once, so each load of twice as
many has a choice of its own.
"""

from __future__ import annotations

from collections import deque

# Guesses of a request in a step: none, one, which takes no step of the head beside the
# one that reads, and as many as published heads are right about in a row.
LENGTHS = (0, 1, 4)
LONGEST = LENGTHS[-1]
# Phases of a trial. The first is not counted: its texts are new to the head.
TRIAL = 6
# A trial ends where two phases are so much slower than the fastest length, and what is
# longer is not tried then: one guess shows whether the head agrees at all.
HOPELESS = 1.5
# A head has to be this much faster than none, as two trials differ by chance.
MARGIN = 1.05
# Phases of a length that its speed is a mean of.
MEMORY = 32
# Phases between trials.
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
        self._begin()

    def _begin(self) -> None:
        """Try all lengths, one after the other."""
        self._trial = [length for length in LENGTHS for _ in range(TRIAL)]
        self._num_tried = self._num_since = 0

    def choose(self) -> int:
        return self._trial[0] if self._trial else max(LENGTHS, key=self._speed)

    def note(self, most: int, num_tokens: int, seconds: float) -> None:
        if not self._trial or self._num_tried:
            self._phases[most].append((num_tokens, seconds))
        if not self._trial:
            self._num_since += 1
            if self._num_since >= PERIOD:
                self._begin()
            return
        del self._trial[0]
        self._num_tried += 1
        if self._num_tried > 2 and self._is_hopeless(most):
            ended = [n for n in LENGTHS if n >= most] if most else [0]
            self._trial = [length for length in self._trial if length not in ended]
        if most not in self._trial:
            self._num_tried = 0

    def _is_hopeless(self, most: int) -> bool:
        """Whether the trial of this length, which is the last one, is far behind."""
        fastest = max(self._speed(length) for length in LENGTHS if length != most)
        return HOPELESS * self._speed(most, self._num_tried - 1) < fastest

    def _speed(self, most: int, num_last: int = MEMORY) -> float:
        """Tokens a second over the last phases of a length."""
        phases = list(self._phases[most])[-num_last:]
        speed = sum(n for n, _ in phases) / max(1e-9, sum(s for _, s in phases))
        return speed if most else MARGIN * speed
