"""Virtual time."""

from __future__ import annotations

import random
from typing import Any


class Clock:
    """Milliseconds that have passed; calling it gives seconds.

    noise: spread of each time, as a share of it. first_use_ms: what the first use of
    each kernel takes on top. busy: how many times slower a neighbour makes everything,
    and for how many seconds at the beginning of every ten.
    """

    def __init__(
        self,
        rng: random.Random,
        noise: float = 0.05,
        first_use_ms: float = 0.0,
        busy: tuple[float, float] = (1.0, 0.0),
    ) -> None:
        self.ms = 0.0
        self.spent: dict[str, float] = {}
        self._rng = rng
        self._noise = noise
        self._first_use_ms = first_use_ms
        self._busy = busy
        self._used: set[Any] = set()

    def __call__(self) -> float:
        return self.ms / 1000

    def spend(self, what: str, ms: float, kernel: Any = None) -> None:
        """Let this time pass; kernel: what it is the first use of, if it is."""
        ms *= max(0.5, 1 + self._noise * self._rng.gauss(0, 1))
        slower, busy_s = self._busy
        if self.ms % 10_000 < 1000 * busy_s:
            ms *= slower
        if self._first_use_ms and kernel is not None and kernel not in self._used:
            self._used.add(kernel)
            ms += self._first_use_ms
        self.ms += ms
        self.spent[what] = self.spent.get(what, 0.0) + ms
