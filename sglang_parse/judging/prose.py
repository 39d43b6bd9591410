"""Where prose ends: boundary rules for lines, paragraphs, sentences and steps.

A rule takes a DraftText and gives boundaries in no particular order. Blank segments,
the end of a finished draft and the limit on segments are segmenter.py's business.

A block of code between fences (```) is not prose. `sentence` cuts it where statements
end; `paragraph` and `step` cut it where a blank line ends a definition.
"""

from __future__ import annotations

import re

from sglang_parse.judging.code import statement_ends
from sglang_parse.judging.draft_text import MARK, SENTENCE_MARK, DraftText
from sglang_parse.judging.fences import FENCE, Span, fenced, holds

WIDE_MARKS = "。！？"  # no white space follows them
QUOTES = "\"'”’"  # behind a mark; more of the sentence may follow
NEXT_SENTENCE = re.compile(r"[^\S\n]+\S")  # on the same line

# Words before "." that end no sentence: at all, before a number, before a small letter.
ABBREVIATIONS = re.compile(
    r"e\.?g|i\.?e|cf|vs|viz|al|dr|mrs?|ms|prof|jr|sr|rev|hon|approx|ca|resp", re.I
)
NUMBERED = re.compile(r"nos?|nr|figs?|eqs?|refs?|sec|ch|vol|pp?", re.I)
SHORTENED = re.compile(r"etc|inc|ltd|corp|co|st|dept|est|a\.m|p\.m|u\.[sk]", re.I)
LAST_WORD = re.compile(r"[^\s(\[{\"']*\Z")
LIST_NUMBER = re.compile(  # a model may count twice: "1. **1. Listen**"
    r"(?:\A|\n)[ \t>*#(-]*(?:\d{1,3}[.)][ \t]*(?:\*\*|__))?(?:step[ \t]+)?\d{1,3}\Z",
    re.I,
)

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


def line_boundaries(draft: DraftText) -> list[int]:
    """After every line break."""
    return [i + 1 for i in draft.newline_tokens]


def paragraph_boundaries(draft: DraftText) -> list[int]:
    """After every blank line, in code only where a definition ends."""
    spans = fenced(draft.text)
    return [
        i + 1
        for i, at in zip(draft.newline_tokens, draft.line_breaks(), strict=True)
        if _is_blank_line(draft.text, at) and not _is_inner_line(draft, at, spans)
    ]


def sentence_boundaries(draft: DraftText) -> list[int]:
    """After every sentence and every line break, in code after every statement.

    Settled: after the token that shows the next sentence, since "12." may go on "12.5".
    """
    spans = fenced(draft.text)
    found = _prose_lines(draft, spans)
    for i in draft.tokens_with(MARK):
        end = draft.ends[i]
        start = end - len(draft.pieces[i])
        for mark in SENTENCE_MARK.finditer(draft.text, start, end):
            if holds(spans, mark.start()):
                continue
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
    step that began earlier in the text. Code is cut where a definition ends, and into
    statements where no line opens a step.
    """
    spans = fenced(draft.text)
    found = []
    for i, at in zip(draft.newline_tokens, draft.line_breaks(), strict=True):
        if holds(spans, at):
            ends_here = _is_blank_line(draft.text, at) and not _is_inner_line(
                draft, at, spans
            )
        else:
            ends_here = _is_blank_line(draft.text, at) or _is_step_end(draft, at)
        if ends_here:
            found.append(i + 1)
    found = found or _prose_lines(draft, spans)
    if found or (draft.settled and _is_within_step(draft.text)):
        return found
    return sentence_boundaries(draft)


def _prose_lines(draft: DraftText, spans: list[Span]) -> list[int]:
    """After every line break of prose and every statement of code; a closing fence
    belongs to the statement before it."""
    if not spans:
        return line_boundaries(draft)
    text, first = draft.text, len(draft.previous_text)
    breaks = zip(draft.newline_tokens, draft.line_breaks(), strict=True)
    found = [i + 1 for i, at in breaks if not holds(spans, at)]
    for start, end in spans:
        if end > first:
            ends = (start + at + 1 for at in statement_ends(text[start:end]))
            found += [
                draft.boundary_at(at)
                for at in ends
                if at > first and not FENCE.match(text, at, end)
            ]
    return found


def _is_inner_line(draft: DraftText, at: int, spans: list[Span]) -> bool:
    """Whether a block of code goes on with the definition behind the line break `at`,
    or may do so."""
    if not holds(spans, at):
        return False
    following = draft.text[at + 1 : at + 2]
    return following.isspace() if following else not draft.ended


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
    if mark.group()[-1] in QUOTES and following[:1].islower():
        return None  # "Who is it?" he asked.
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
