"""Blocks of code between fences (```), as Markdown writes them."""

from __future__ import annotations

import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

FENCE = re.compile(r"^[ \t>]*(```+|~~~+)[ \t]*([^\n`]*)$", re.MULTILINE)

LONGEST = 256  # characters of a line that may be a fence

Span = tuple[int, int]


def fenced(text: str) -> list[Span]:
    """Start and end offset of each block, both fences within, in order.

    A block ends at the end of its closing line, before the line break. One that is
    open ends with the text.
    """
    if "```" not in text and "~~~" not in text:
        return []
    spans: list[Span] = []
    opened: re.Match[str] | None = None
    for fence in FENCE.finditer(text):
        if opened is None:
            opened = fence
        elif _closes(fence, opened[1]):
            spans.append((opened.start(), fence.end()))
            opened = None
    if opened is not None:
        spans.append((opened.start(), len(text)))
    return spans


def holds(spans: Sequence[Span], at: int) -> bool:
    """Whether a block holds the character at offset `at`. spans: in order."""
    k = bisect_right(spans, (at, at + 1)) - 1
    return any(start <= at < end for start, end in spans[max(0, k) : k + 2])


@dataclass
class FenceReader:
    """Reads a growing text of tokens once, and knows where fences are open."""

    #: Tokens that were read.
    num_read: int = 0
    #: The line that has not ended, and the token in which it begins.
    _line: str = ""
    _line_token: int = 0
    #: The run of marks that opened the last block.
    _marks: str = ""
    #: Tokens in which fences begin, rising, and the line that is open behind each.
    _tokens: list[int] = field(default_factory=list)
    _opened: list[str] = field(default_factory=list)

    def read(self, texts: Iterable[str]) -> None:
        """Go on with the texts of the next tokens."""
        for text in texts:
            first, *others = text.split("\n")
            self._line = (self._line + first)[:LONGEST]
            for rest in others:
                self._end_line()
                self._line = rest
                self._line_token = self.num_read + (not rest)
            self.num_read += 1

    def open_before(self, index: int) -> str:
        """The opening line of the block that is open in front of token `index`, with
        its line break; "" if there is none."""
        k = bisect_left(self._tokens, index)
        return self._opened[k - 1] if k else ""

    def _end_line(self) -> None:
        fence = FENCE.fullmatch(self._line)
        if fence is None:
            return
        if not self.is_open:
            self._marks = fence[1]
            self._note(self._line + "\n")
        elif _closes(fence, self._marks):
            self._note("")

    @property
    def is_open(self) -> bool:
        return bool(self._opened) and bool(self._opened[-1])

    def _note(self, opened: str) -> None:
        self._tokens.append(self._line_token)
        self._opened.append(opened)


def _closes(fence: re.Match[str], marks: str) -> bool:
    """Whether a fence ends the block that `marks` opened."""
    return fence[1].startswith(marks) and not fence[2].strip()
