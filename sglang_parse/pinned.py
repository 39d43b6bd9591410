"""A switch for benchmarks: verdicts that keep a fixed share of every draft.

With random weights there is nothing to judge, yet the cost of a round does not depend
on what the verdicts say. SGLANG_PARSE_TEST_KEEP=0.9 makes them keep 90% of what is
drafted. Never set it where anybody reads the answers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence

logger = logging.getLogger(__name__)

KEEP_ENV = "SGLANG_PARSE_TEST_KEEP"


class PinnedVerdicts:
    """Scores that keep `fraction` of all draft tokens, whole segments at a time."""

    def __init__(self, fraction: float) -> None:
        self.fraction = fraction
        self._owed = 0.0

    def scores(
        self, boundaries: Sequence[int], num_draft_tokens: int
    ) -> tuple[float, ...]:
        """1 for the prefixes to keep, 0 for the others; one per boundary.

        What a segment is too long for is owed to the drafts that follow.
        """
        self._owed += self.fraction * num_draft_tokens
        kept = max((b for b in boundaries if b <= self._owed), default=0)
        self._owed -= kept
        return tuple(float(b <= kept) for b in boundaries)


def pinned_verdicts() -> PinnedVerdicts | None:
    """What the environment asks for; None in production.

    Raises ValueError unless the variable is unset or a number from 0 to 1.
    """
    value = os.environ.get(KEEP_ENV)
    if value is None:
        return None
    try:
        fraction = float(value)
    except ValueError:
        fraction = -1.0
    if not 0.0 <= fraction <= 1.0:
        raise ValueError(f"{KEEP_ENV} is {value!r}; expected a number from 0 to 1.")
    logger.warning(
        "%s=%s: VERDICTS ARE MADE UP, every draft is kept to that share whatever the "
        "target thinks of it. For speed measurements with random weights only.",
        KEEP_ENV,
        value,
    )
    return PinnedVerdicts(fraction)
