"""Where prose ends: boundary rules for lines, paragraphs, sentences and steps.

A rule takes a DraftText and gives boundaries in no particular order. Blank segments,
the end of a finished draft and the limit on segments are segment.py's business.
"""

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
WIDE_MARKS = "。！？"  # no white space follows them
NEXT_SENTENCE = re.compile(r"[^\S\n]+\S")  # on the same line

# Words before "." that end no sentence: at all, before a number, before a small letter.
ABBREVIATIONS = re.compile(
    r"e\.?g|i\.?e|cf|vs|viz|al|dr|mrs?|ms|prof|jr|sr|rev|hon|approx|ca|resp", re.I
)
NUMBERED = re.compile(r"nos?|nr|figs?|eqs?|refs?|sec|ch|vol|pp?", re.I)
SHORTENED = re.compile(r"etc|inc|ltd|corp|co|st|dept|est|a\.m|p\.m|u\.[sk]", re.I)
LAST_WORD = re.compile(r"[^\s(\[{\"']*\Z")
LIST_NUMBER = re.compile(r"(?:\A|\n)[ \t>*#(-]*(?:step[ \t]+)?\d{1,3}\Z", re.I)

INDENT = r"[ \t>]*"
BOLD = r"(?:\*\*|__)?"
HEADER = re.compile(
    rf"{INDENT}(?:"
    r"#{1,6}[ \t]|[-*+•–][ \t]"  # heading or bullet
    r"|####|\$*\\(?:boxed|\[)"  # answers as GSM8K and MATH write them
    rf"|{BOLD}(?:"
    r"(?i:step|case|part|stage)[ \t]*\#?(?:\d+|[ivx]+\b|one|two|three|four|five|six)"
    r"|\(?\d{1,3}[.):](?=\s|\*|\Z)|\(?[a-zA-Z]\)\s"  # "3.", "3)", "(3)", "a)"
    r"|(?:First|Second|Third|Fourth|Fifth|Last|Final)(?:ly)?[ \t]*[,:]"
    r"|(?:First|Next|Then|Now|Finally)\b(?![-'’])"
    r"|(?i:(?:so,?[ \t]+)?(?:the[ \t]+)?(?:final[ \t]+)?(?:answer|result)\b"
    r"[ \t]*(?:is\b|[:*=]))"
    r"|(?:So|Therefore|Thus|Hence|Conclusion|In conclusion)\b"
    r"))"
)
BLANK_LINE = re.compile(r"\n[ \t]*\n")
# The first word of a line, too short yet to tell whether it opens a step. Possessive:
# two runs of blanks beside each other would be tried in every split.
UNDECIDED = re.compile(r"[ \t]*+[^\w\s]*+[ \t]*+\w*+[ \t]?\w{0,3}\Z")


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


def line_boundaries(draft: DraftText) -> list[int]:
    """After every line break."""
    return [i + 1 for i in draft.newline_tokens]


def paragraph_boundaries(draft: DraftText) -> list[int]:
    """After every blank line."""
    return [
        i + 1
        for i, at in zip(draft.newline_tokens, draft.line_breaks(), strict=True)
        if _is_blank_line(draft.text, at)
    ]


def sentence_boundaries(draft: DraftText) -> list[int]:
    """After every sentence and every line break.

    Settled: after the token that shows the next sentence, since "12." may go on "12.5".
    """
    found = line_boundaries(draft)
    for i in draft.tokens_with(MARK):
        end = draft.ends[i]
        start = end - len(draft.pieces[i])
        for mark in SENTENCE_MARK.finditer(draft.text, start, end):
            stop = _sentence_stop(draft.text, mark.start())
            if stop is not None and draft.settled and mark.group()[0] not in WIDE_MARKS:
                begun = NEXT_SENTENCE.match(draft.text, stop)
                stop = begun.end() if begun else None
            if stop is not None:
                found.append(draft.boundary_at(stop))
    return found


def step_boundaries(draft: DraftText) -> list[int]:
    """Before every line that opens a step or states the answer, after blank lines.

    An unfinished draft that ends right after a step line, or so soon after it that the
    next line cannot be told, also has a boundary there. A draft without any of these is
    cut into lines, and one without line breaks into sentences; settled, not within a
    step that began earlier in the text.
    """
    found = [
        i + 1
        for i, at in zip(draft.newline_tokens, draft.line_breaks(), strict=True)
        if _is_blank_line(draft.text, at) or _is_step_end(draft, at)
    ]
    found = found or line_boundaries(draft)
    if found or (draft.settled and _is_within_step(draft.text)):
        return found
    return sentence_boundaries(draft)


def _line_start(text: str, at: int) -> int:
    """Where the line that breaks at `at` starts."""
    return text.rfind("\n", 0, at) + 1


def _is_blank_line(text: str, at: int) -> bool:
    """Whether a line of `text` that is blank breaks at `at`."""
    start = _line_start(text, at)
    return start > 0 and not text[start:at].strip()


def _is_within_step(text: str) -> bool:
    """Whether a line opens a step behind the last blank line."""
    return any(map(HEADER.match, BLANK_LINE.split(text)[-1].split("\n")))


def _is_step_end(draft: DraftText, at: int) -> bool:
    text = draft.text
    if HEADER.match(text, at + 1):
        return True
    if draft.ended or not UNDECIDED.match(text, at + 1):
        return False
    return HEADER.match(text, _line_start(text, at)) is not None


def _sentence_stop(text: str, at: int) -> int | None:
    """End of the sentence whose closing mark starts at `at`, None if it is no end."""
    if at and text[at - 1] in ".!?…":
        return None  # before the match: each mark of a long run would look at the rest
    mark = SENTENCE_MARK.match(text, at)
    if mark is None:
        return None
    following = text[mark.end() : mark.end() + 8].lstrip()
    if text.startswith(("..", "…"), at):
        return None if following[:1].islower() else mark.end()
    if text[at] == "." and _is_inner_period(text[max(0, at - 40) : at], following):
        return None
    return mark.end()


def _is_inner_period(before: str, following: str) -> bool:
    """Whether a period after `before` belongs to an abbreviation or a list number."""
    found = LAST_WORD.search(before)
    word = found.group() if found else ""
    if ABBREVIATIONS.fullmatch(word) or LIST_NUMBER.search(before):
        return True
    if NUMBERED.fullmatch(word):
        return following[:1].isdigit()
    if SHORTENED.fullmatch(word):
        return bool(following) and not following[0].isupper()
    return len(word) == 1 and word.isupper() and following[:1].isupper()  # "J. Doe"
