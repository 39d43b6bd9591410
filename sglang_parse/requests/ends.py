"""Where texts end that are written step by step; pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence


class TextEnds:
    """What the steps read so far say of the ends of texts that grow together.

    lens: tokens that each text may have at most. stops: tokens that end it.
    """

    def __init__(self, lens: Sequence[int], stops: Sequence[Collection[int]]) -> None:
        #: Tokens of each text up to its end, and including it, as far as is known.
        self.lens = list(lens)
        self._stops = stops
        self._num_seen = 0

    def see(self, steps: Sequence[Sequence[int]]) -> None:
        """Learn what was written. steps: the tokens of all steps that are known, from
        the first one on, a token for each text."""
        for tokens in steps[self._num_seen :]:
            self._num_seen += 1
            for k, (token, stops) in enumerate(zip(tokens, self._stops, strict=True)):
                if token in stops:
                    self.lens[k] = min(self.lens[k], self._num_seen)
