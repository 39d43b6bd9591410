"""Text that came with a request, as a drafter: client drafts and Predicted Outputs.

Nothing is generated to draft from it; after the output left the text, its place is
found again by the longest run of tokens that the output ends with.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import partial
from itertools import accumulate, takewhile
from typing import Any

from sglang_parse.judging.special_tokens import encode_as_text

# Longest run compared, and the shortest that counts as a place found again.
MAX_RUN = 16
MIN_RUN = 2


class ClientText:
    """tokens: the text's token ids. cuts: ends of the client's own segments in it, or
    None where the segmenter is to find them."""

    def __init__(
        self, tokens: Sequence[int], cuts: tuple[int, ...] | None = None
    ) -> None:
        self.tokens = tuple(tokens)
        self.cuts = cuts
        self._num_seen = 0  # output tokens followed so far
        self._places: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
        for end in range(MIN_RUN, len(self.tokens) + 1):
            self._places[self.tokens[end - MIN_RUN : end]].append(end)
        self._at = 0  # offset in `tokens` that the output has reached
        #: Output tokens when the place was last found again, None if never.
        self.found_at: int | None = None
        # (start, end, output_end): tokens [start, end) end the output's first
        # output_end.
        self._runs: list[tuple[int, int, int]] = []

    @classmethod
    def of(
        cls,
        text: str | Sequence[str],
        tokenizer: Any,
        stop_ids: Collection[int] = frozenset(),
        *,
        is_plain: bool = False,
    ) -> ClientText:
        """A text, up to the first token of `stop_ids`, or its segments, each encoded
        for itself. Where an answer ends the target says, as behind any draft.

        is_plain: whether special tokens in it are plain text.
        """
        parts = [text] if isinstance(text, str) else text
        encode = partial(tokenizer.encode, add_special_tokens=False)
        if is_plain:
            encode = partial(encode_as_text, tokenizer)
        ids = [encode(part) for part in parts]
        ends = tuple(accumulate(map(len, ids)))
        tokens = [token for part in ids for token in part]
        if isinstance(text, str):
            tokens = list(takewhile(lambda token: token not in stop_ids, tokens))
        return cls(tokens, None if isinstance(text, str) else ends)

    def propose(self, output: Sequence[int]) -> tuple[int, ...]:
        """The rest of the text as it would follow `output`, empty if it would not."""
        if not self._follow(output):
            return ()
        return self.tokens[self._at :]

    def num_accepted(self, output: Sequence[int]) -> int:
        """How many of the text's tokens stand in the output, which may have been cut
        since the last call."""
        if len(output) > self._num_seen:
            self._follow(output)
        accepted = bytearray(len(self.tokens))
        for start, end, output_end in self._runs:
            end = max(start, end - max(0, output_end - len(output)))
            accepted[start:end] = b"\1" * (end - start)
        return sum(accepted)

    def _follow(self, output: Sequence[int]) -> bool:
        """Move on with an output that is longer than at the last call; False if it
        ends in nothing that the text holds."""
        at = self._at
        num_seen = self._num_seen
        new = output[num_seen:]
        self._num_seen = len(output)
        agreed = 0
        for token, expected in zip(new, self.tokens[at:], strict=False):
            if token != expected:
                break
            agreed += 1
        self._accept(at, at + agreed, num_seen + agreed)
        self._at = at + agreed
        if agreed == len(new):
            return True
        found = self._find(output)
        if found is None:
            return False
        end, run = found
        self._accept(end - run, end, len(output))
        self._at, self.found_at = end, len(output)
        return True

    def _accept(self, start: int, end: int, output_end: int) -> None:
        if start < end:
            self._runs.append((start, end, output_end))

    def _find(self, output: Sequence[int]) -> tuple[int, int] | None:
        """(end, length) of the longest run that ends the output; the next on a tie."""
        tail = tuple(output[-MAX_RUN:])
        best: tuple[int, bool, int] | None = None
        place = 0
        for end in self._places.get(tail[-MIN_RUN:], ()):
            run = MIN_RUN
            while (
                run < min(len(tail), end)
                and self.tokens[end - run - 1] == tail[-run - 1]
            ):
                run += 1
            # Longest first, then ahead of where we were, then nearest.
            rank = (run, end >= self._at, -abs(end - self._at))
            if best is None or rank > best:
                best, place = rank, end
        return (place, best[0]) if best else None
