"""Switches for benchmarks with random weights: verdicts and agreement made up.

There is nothing to judge then and nothing to agree on, yet the cost of a round does not
depend on what comes out. SGLANG_PARSE_TEST_KEEP=0.9 makes verdicts keep 90% of what is
drafted; with SGLANG_PARSE_TEST_FREE=1 they take no rows of a pass, which bounds what
any probe can save. SGLANG_PARSE_TEST_ACCEPT=3.5 makes the target, where a draft is
followed token by token, agree so that a pass gives 3.5 tokens on average, as SGLang's
own SGLANG_SIMULATE_ACC_LEN does. `@FILE` in place of a number has the number read from
that file at each pass, so that one server serves several shares, one after the other.
Never set any where anybody reads the answers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

logger = logging.getLogger(__name__)

KEEP_ENV = "SGLANG_PARSE_TEST_KEEP"
ACCEPT_ENV = "SGLANG_PARSE_TEST_ACCEPT"
FREE_ENV = "SGLANG_PARSE_TEST_FREE"
FILE_MARK = "@"


class PinnedVerdicts:
    """Scores that keep `fraction` of all draft tokens, whole segments at a time.

    fraction: asked at each draft. free: verdicts take no rows, as a probe's.
    """

    def __init__(self, fraction: Callable[[], float], *, free: bool = False) -> None:
        self.fraction = fraction
        self.free = free
        self._last = fraction()
        self._owed = 0.0

    def scores(
        self, boundaries: Sequence[int], num_draft_tokens: int
    ) -> tuple[float, ...]:
        """1 for the prefixes to keep, 0 for the others; one per boundary.

        What a segment is too long for is owed to the drafts that follow, as long as the
        fraction stays.
        """
        last, self._last = self._last, self.fraction()
        if self._last != last:
            self._owed = 0.0
        self._owed += self._last * num_draft_tokens
        kept = max((b for b in boundaries if b <= self._owed), default=0)
        self._owed -= kept
        return tuple(float(b <= kept) for b in boundaries)


class PinnedAgreement:
    """Tokens of a target that agrees with `accept_length` - 1 draft tokens a pass.

    accept_length: asked at each pass.
    """

    def __init__(self, accept_length: Callable[[], float]) -> None:
        self.accept_length = accept_length
        self._owed = 0.0

    def follow(
        self, draft_tokens: Sequence[int], target_tokens: Sequence[int]
    ) -> list[int]:
        """What the target is said to have chosen at the rows of these draft tokens, its
        own token behind them included where target_tokens has one more.

        The fraction of a token is owed to the passes that follow; what a draft is too
        short for is not.
        """
        self._owed += self.accept_length() - 1
        agreed = min(int(self._owed), len(draft_tokens))
        self._owed %= 1.0
        tokens = [*draft_tokens[:agreed], *target_tokens[agreed:]]
        if agreed < len(draft_tokens) and tokens[agreed] == draft_tokens[agreed]:
            tokens[agreed] = tokens[agreed] - 1 if tokens[agreed] else 1
        return tokens


def pinned_verdicts() -> PinnedVerdicts | None:
    """What the environment asks for; None in production.

    Raises ValueError unless the variable is unset, a number from 0 to 1, or names a
    file that holds one.
    """
    fraction = _number(KEEP_ENV, lambda x: 0.0 <= x <= 1.0, "a number from 0 to 1")
    if fraction is None:
        return None
    logger.warning(
        "%s=%g: VERDICTS ARE MADE UP, every draft is kept to that share whatever the "
        "target thinks of it. For speed measurements with random weights only.",
        KEEP_ENV,
        fraction(),
    )
    return PinnedVerdicts(fraction, free=os.environ.get(FREE_ENV) == "1")


def pinned_agreement() -> PinnedAgreement | None:
    """What the environment asks for; None in production.

    Raises ValueError unless the variable is unset, a number from 1 to 1000, or names a
    file that holds one.
    """
    length = _number(ACCEPT_ENV, lambda x: 1.0 <= x <= 1e3, "a number from 1 to 1000")
    if length is None:
        return None
    logger.warning(
        "%s=%g: THE TARGET'S TOKENS ARE MADE UP, a pass gives so many whatever "
        "it would have written. For speed measurements with random weights only.",
        ACCEPT_ENV,
        length(),
    )
    return PinnedAgreement(length)


def _number(
    name: str, is_allowed: Callable[[float], bool], what: str
) -> Callable[[], float] | None:
    """The number that the environment gives, or reads anew from a file at each call."""
    value = os.environ.get(name)
    if value is None:
        return None

    def parse(text: str) -> float:
        try:
            number = float(text)
            allowed = is_allowed(number)
        except ValueError:
            allowed = False
        if not allowed:
            raise ValueError(f"{name} is {text!r}; expected {what}.")
        return number

    if value.startswith(FILE_MARK):
        path = Path(value.removeprefix(FILE_MARK))

        def read() -> float:
            return parse(path.read_text(encoding="utf-8").strip())

        return read
    number = parse(value)
    return lambda: number
