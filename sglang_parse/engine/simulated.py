"""Switches for benchmarks: verdicts and agreement made up, and verdicts without rows.

With random weights there is nothing to judge and nothing to agree on, yet the cost of a
round does not depend on what comes out. SGLANG_PARSE_TEST_KEEP=0.9 makes verdicts keep
90% of what is drafted. SGLANG_PARSE_TEST_ACCEPT=3.5 makes the target, where a draft is
followed token by token, agree so that a pass gives 3.5 tokens on average, as SGLang's
own SGLANG_SIMULATE_ACC_LEN does. `@FILE` in place of a number has the number read from
that file at each pass, so that one server serves several shares, one after the other.
Never set these where anybody reads the answers.

SGLANG_PARSE_TEST_FREE=1 keeps the question's verdicts, so that the same prefix takes no
rows when it is judged again. That bounds what any probe can save.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Sequence
from pathlib import Path

from sglang_parse.requests.round import RequestRound, Round

logger = logging.getLogger(__name__)

KEEP_ENV = "SGLANG_PARSE_TEST_KEEP"
ACCEPT_ENV = "SGLANG_PARSE_TEST_ACCEPT"
FREE_ENV = "SGLANG_PARSE_TEST_FREE"
FILE_MARK = "@"


class PinnedVerdicts:
    """Scores that keep `fraction` of all draft tokens, whole segments at a time.

    fraction: asked at each draft.
    """

    def __init__(self, fraction: Callable[[], float]) -> None:
        self.fraction = fraction
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


class RememberedVerdicts:
    """The question's verdicts: a prefix that was judged before takes no rows.

    Nothing is forgotten, so that a server grows with what it serves.
    """

    def __init__(self) -> None:
        self._scores: dict[int, float] = {}

    def open(self, round: Round) -> None:
        """A verdict is expected to take no rows, as a probe's."""
        for r in round:
            r.judge_kind, r.rows_per_verdict = "probe", 0.0

    def choose(self, round: Round, *, room: int) -> None:
        """Fill `unasked` of each request. room: rows that suffixes may take; what there
        is no room for is not judged."""
        for r in round:
            new = [b for b in r.boundaries if self._key(r, b) not in self._scores]
            num = min(len(new), max(0, room) // len(r.state.suffix))
            room -= num * len(r.state.suffix)
            dropped = set(new[num:])
            r.boundaries = tuple(b for b in r.boundaries if b not in dropped)
            r.unasked = frozenset(r.boundaries).difference(new)

    def settle(self, round: Round) -> None:
        """Keep what was asked, and fill in what is known."""
        for r in round:
            for b, found in zip(r.asked, r.scores, strict=True):
                self._scores[self._key(r, b)] = found
            r.scores = tuple(self._scores[self._key(r, b)] for b in r.boundaries)

    def _key(self, r: RequestRound, boundary: int) -> int:
        text = (*r.req.origin_input_ids, *r.req.output_ids, *r.state.ready)
        return hash((text + r.draft.tokens[:boundary], r.state.suffix))


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
    return PinnedVerdicts(fraction)


def remembered_verdicts() -> RememberedVerdicts | None:
    """What the environment asks for; None in production."""
    if os.environ.get(FREE_ENV) != "1":
        return None
    logger.warning(
        "%s=1: VERDICTS ARE REMEMBERED and take no rows the second time. For speed "
        "measurements only.",
        FREE_ENV,
    )
    return RememberedVerdicts()


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
