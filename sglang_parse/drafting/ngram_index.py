"""Where the last tokens of a text stood before: an index that grows with it; pure.

Each run of three tokens is a key, and each of two. The prompt's keys are sorted once;
those of the answer go into a dictionary one by one. So what a new token costs does not
depend on the length of the text.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

# Tokens of a key: a match of three says more, and is looked for first. In an edited
# text often only two agree before it goes on.
GRAMS = (3, 2)
# Bits that each token has in a key.
BITS = 21
_MASK = (1 << BITS) - 1
# Most places that are compared in one look-up, and most tokens of each.
MAX_PLACES = 16
MAX_MATCH = 64


class Match(NamedTuple):
    """A place at which the text's last tokens stood before."""

    #: Offset of the token that followed there.
    cursor: int
    #: Tokens before it that agree with the text's last ones, at most MAX_MATCH.
    length: int


class NgramIndex:
    """The tokens of one text, and where each of its short runs ends in it."""

    def __init__(self, prompt: Sequence[int]) -> None:
        self.tokens = list(prompt)
        self._runs = [_Runs(self.tokens, num) for num in GRAMS]

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Sequence[int]) -> None:
        """The text goes on."""
        self.tokens += tokens

    def find(self, near: int) -> Match | None:
        """The longest match of the text's end, None without one of GRAMS[-1] tokens.

        near: of equally long matches the first one from this offset on is taken, else
        the last one before it.
        """
        for runs in self._runs:
            if match := runs.find(near):
                return match
        return None

    def copy(self, cursor: int, num: int) -> list[int]:
        """`num` tokens from an offset on; behind the text's end the copy repeats."""
        found = self.tokens[cursor : cursor + num]
        period = len(self.tokens) - cursor
        while len(found) < num:
            found += found[len(found) - period :][: num - len(found)]
        return found


class _Runs:
    """Where each run of `gram` tokens ends in a text, which grows."""

    def __init__(self, tokens: list[int], gram: int) -> None:
        self._tokens, self._gram = tokens, gram
        ids = np.asarray(tokens, dtype=np.int64) & _MASK
        keys = ids[: -gram + 1] if len(ids) >= gram else ids[:0]
        for k in range(1, gram):
            keys = (keys << BITS) | ids[k : k + len(keys)]
        # The last run has nothing behind it yet; it is added with the next token.
        keys = keys[:-1]
        order = np.argsort(keys, kind="stable")
        self._keys = array("q", keys[order].tobytes())
        self._ends = array("q", (order + gram).astype(np.int64).tobytes())
        # Runs that end in the answer: key -> last end, and end -> the one before it.
        self._last: dict[int, int] = {}
        self._before: list[int] = []
        self._first_end = self._num_indexed = max(gram, len(tokens))

    def find(self, near: int) -> Match | None:
        """The longest match of the text's end that has this many tokens at least."""
        self._add()
        if len(self._tokens) < self._gram:
            return None
        best: Match | None = None
        for end in self._places(self._key(len(self._tokens)), near):
            length = self._length(end)
            if length < self._gram:
                continue  # ids beyond the bits of a key
            one = Match(end, length)
            if best is None or _rank(one, near) > _rank(best, near):
                best = one
        return best

    def _add(self) -> None:
        """Index the runs of the answer that have a token behind them."""
        for end in range(self._num_indexed, len(self._tokens)):
            key = self._key(end)
            self._before.append(self._last.get(key, -1))
            self._last[key] = end
        self._num_indexed = max(self._num_indexed, len(self._tokens))

    def _key(self, end: int) -> int:
        key = 0
        for token in self._tokens[end - self._gram : end]:
            key = key << BITS | token & _MASK
        return key

    def _places(self, key: int, near: int) -> Iterator[int]:
        """Ends of earlier runs with this key: the latest of the answer, then those of
        the prompt around `near` and the latest of them."""
        left = MAX_PLACES // 2
        end = self._last.get(key, -1)
        while end >= 0 and left:
            yield end
            left -= 1
            end = self._before[end - self._first_end]
        low, high = bisect_left(self._keys, key), bisect_right(self._keys, key)
        if high - low <= MAX_PLACES:
            yield from self._ends[low:high]
            return
        at = bisect_left(self._ends, near, low, high)
        first = max(low, min(at - MAX_PLACES // 4, high - MAX_PLACES // 2))
        yield from self._ends[first : first + MAX_PLACES // 2]
        yield from self._ends[
            max(first + MAX_PLACES // 2, high - MAX_PLACES // 4) : high
        ]

    def _length(self, end: int) -> int:
        """Tokens before `end` that agree with the text's last ones."""
        tokens, n = self._tokens, len(self._tokens)
        most = min(MAX_MATCH, end)
        num = 0
        while num < most and tokens[end - 1 - num] == tokens[n - 1 - num]:
            num += 1
        return num


def _rank(one: Match, near: int) -> tuple[int, bool, int]:
    """The longer the better; then the first from `near` on, then the last before it."""
    ahead = one.cursor >= near
    return one.length, ahead, -one.cursor if ahead else one.cursor
