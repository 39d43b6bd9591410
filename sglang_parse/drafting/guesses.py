"""What a draft model probably writes next, by what it has written before; pure."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_parse.drafting.lanes import Lane

# Tokens of the runs that the table knows; a longer run is looked up first.
RUNS = (3, 2)
# A follower has a vote for each time it came, less one for each time another did. From
# so many votes on it is guessed, and no more than so many are counted.
LEAST_VOTES, MOST_VOTES = 2, 4
# Share of the tokens that have to be guessed right, so that a step writes more than 1.5
# tokens. The host reads each such step: 0.5 ms or more beside 2.2 ms on an H200.
LEAST_SHARE = 0.35
# Tokens over which that share is a mean.
MEMORY = 256
# Runs that are kept; the table begins anew when it is full (about 10 MB).
MOST_RUNS = 1 << 16


class GuessTable:
    """The tokens that followed each short run, over all requests of a server.

    Copies of a prompt are left to the n-gram drafter, which needs no model for them.
    """

    def __init__(self) -> None:
        self._followers: dict[tuple[int, ...], tuple[int, int]] = {}
        #: The share of recent tokens that the table would have guessed.
        self.share = 0.0

    @property
    def pays(self) -> bool:
        return self.share >= LEAST_SHARE

    def look_up(self, lanes: Sequence[Lane], most: Sequence[int]) -> list[list[int]]:
        """At most `most` tokens that may follow behind each lane."""
        texts = [
            [*one.request.tokens[-RUNS[0] :], *one.tokens[-RUNS[0] :]] for one in lanes
        ]
        return [self.guess(t, num) for t, num in zip(texts, most, strict=True)]

    def guess(self, tokens: Sequence[int], most: int) -> list[int]:
        """At most `most` tokens that may follow; the last few of `tokens` count."""
        tail, found = tuple(tokens[-RUNS[0] :]), list[int]()
        while len(found) < most and (token := self._next(tail)) is not None:
            found.append(token)
            tail = (*tail, token)[-RUNS[0] :]
        return found

    def learn(self, before: Sequence[int], tokens: Sequence[int]) -> None:
        """tokens: written after `before`, of which the last few count."""
        if len(self._followers) > MOST_RUNS:
            self._followers.clear()
        tail = tuple(before[-RUNS[0] :])
        for token in tokens:
            is_right = self._next(tail) == token
            self.share += (is_right - self.share) / MEMORY
            for num in RUNS:
                self._vote(tail[-num:], token)
            tail = (*tail, token)[-RUNS[0] :]

    def _next(self, tail: tuple[int, ...]) -> int | None:
        for num in RUNS:
            token, votes = self._followers.get(tail[-num:], (0, 0))
            if votes >= LEAST_VOTES:
                return token
        return None

    def _vote(self, run: tuple[int, ...], token: int) -> None:
        known, votes = self._followers.get(run, (token, 0))
        if known == token:
            votes = min(votes + 1, MOST_VOTES)
        else:
            known, votes = (known, votes - 1) if votes > 1 else (token, 1)
        self._followers[run] = known, votes
