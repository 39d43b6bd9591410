"""One draft as a segmenter's rule sees it."""

from __future__ import annotations

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, compress, count

# Flags of a token, one byte per vocabulary entry.
NEWLINE = 1  # holds a line break
MARK = 2  # holds a mark that may end a sentence: ".", '?"', "。", but not "3.14"
BLANK = 4  # whitespace or nothing
# Per flag, a table for bytes.translate: 1 where a byte carries the flag, else 0.
CARRIES = {
    flag: bytes(bool(flags & flag) for flags in range(256))
    for flag in (NEWLINE, MARK, BLANK)
}
ALL_BLANK = bytes(flags for flags in range(256) if flags & BLANK)

CLOSERS = r"""["'”’)\]»*_$]*"""
SENTENCE_MARK = re.compile(rf"[.!?…]+{CLOSERS}(?=\s|$)|[。！？]+[”’」』）)]*")


def token_flags(texts: Sequence[str]) -> bytes:
    """Flags of every token text."""
    return bytes(
        NEWLINE * ("\n" in text)
        | MARK * (SENTENCE_MARK.search(text) is not None)
        | BLANK * (not text or text.isspace())
        for text in texts
    )


@dataclass(frozen=True)
class DraftText:
    """One draft as a rule sees it; what no rule asks for is not computed.

    Most tokens decide nothing: a rule looks for the flags first, and at the text only
    around the tokens that carry them.
    """

    #: Text of each token.
    pieces: Sequence[str]
    #: Flags of each token: NEWLINE, MARK and BLANK, or none of them.
    flags: bytes
    #: The last characters committed before the draft.
    previous_text: str
    #: Whether the draft stopped at the end of the response.
    ended: bool
    #: Whether a sentence ends only where the next is seen to begin.
    settled: bool = False

    @cached_property
    def text(self) -> str:
        """previous_text followed by the draft."""
        return self.previous_text + "".join(self.pieces)

    @cached_property
    def ends(self) -> list[int]:
        """Offset in `text` at which each token ends."""
        start = len(self.previous_text)
        return list(accumulate(map(len, self.pieces), initial=start))[1:]

    @cached_property
    def newline_tokens(self) -> list[int]:
        """Tokens with a line break, but for those before anything visible."""
        found = self.tokens_with(NEWLINE)
        first = num_blank(self.flags)
        start = bisect_left(found, first)
        if start < len(found) and found[start] == first:
            is_leading = not self.pieces[first].rpartition("\n")[0].strip()
            start += is_leading
        return found[start:]

    def tokens_with(self, flag: int) -> list[int]:
        """Tokens that carry the flag."""
        return list(compress(count(), self.flags.translate(CARRIES[flag])))

    def line_breaks(self) -> list[int]:
        """Offset in `text` of the last line break of each of newline_tokens."""
        found = []
        start, end = 0, len(self.previous_text)
        for i in self.newline_tokens:
            end += len("".join(self.pieces[start : i + 1]))
            found.append(self.text.rindex("\n", 0, end))
            start = i + 1
        return found

    def boundary_at(self, offset: int) -> int:
        """Boundary after the token that holds the character before `offset`."""
        return bisect_left(self.ends, offset) + 1


def num_blank(flags: bytes) -> int:
    """Tokens before the first that shows something."""
    return len(flags) - len(flags.lstrip(ALL_BLANK))
