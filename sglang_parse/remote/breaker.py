"""When to leave a server alone that is of no use."""

from __future__ import annotations

import time
from collections.abc import Callable

# Failures in a row after which a server is left alone, and for how many seconds: the
# first time, and at most.
MAX_FAILURES = 3
REST_S, MAX_REST_S = 10.0, 300.0


class Breaker:
    """Leaves a server alone that fails several times in a row, each time for twice as
    long as before."""

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        most: int = MAX_FAILURES,
        rest_s: float = REST_S,
        longest_s: float = MAX_REST_S,
    ) -> None:
        """most: failures in a row. rest_s, longest_s: first and longest pause."""
        self._clock = clock
        self._most, self._first_s, self._longest_s = most, rest_s, longest_s
        self._failures = 0
        self._rest_s = rest_s
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the server is left alone now. After the pause one more is tried."""
        return self.is_failing and self._clock() < self._until

    @property
    def is_failing(self) -> bool:
        """Whether the last streams failed: one at a time is enough then."""
        return self._failures >= self._most

    def succeed(self) -> None:
        self._failures, self._rest_s = 0, self._first_s

    def fail(self) -> bool:
        """Count a failure; whether the server is left alone from now on."""
        self._failures += 1
        if not self.is_failing or self.is_open:
            return False
        self._until = self._clock() + self._rest_s
        self._rest_s = min(2 * self._rest_s, self._longest_s)
        return True
