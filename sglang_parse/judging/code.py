"""Where code ends a statement or a block: the boundary rule of the `code` segmenter.

A reading of the text good enough for Python and for languages with braces, not a
parser: brackets, strings, comments and line ends are told apart, nothing else.
"""

from __future__ import annotations

import re

from sglang_parse.judging.draft_text import DraftText

WORD = r"[^\s()\[\]{}\"'`\#/\\]++"
ITEM = re.compile(
    r"""
    (?P<fence>^[ \t]*```[^\n]*)
    | (?P<triple>\"\"\"|''')
    | (?P<string>"(?:\\.|[^"\\\n]){0,1024}+"|'(?:\\.|[^'\\\n]){0,1024}+'
        |`[^`\n]{0,1024}+`)  # bounded: a quote that nothing closes looks that far
    | (?P<comment>(?:^|(?<=\s))\#[^\n]*|(?:^[ \t]*|(?<=[;{},])[ \t]*)//[^\n]*
        |/\*[\s\S]*?(?:\*/|\Z))
    | (?P<joined>\\\n)
    | (?P<newline>\n)
    | (?P<open>[(\[{])
    | (?P<close>[)\]}])
    """
    rf"| (?P<other>{WORD}(?:[ \t]+{WORD})*+|\S)",  # a line of words is one item
    re.VERBOSE | re.MULTILINE,
)
# What stands before a triple quote that opens a string; any other one closes a string
# that began before previous_text.
BEFORE_TRIPLE = re.compile(r"(?:\A|[:=(\[{,+]|\breturn|```\w*)\s*[rbfuRBFU]{0,2}\Z")
# What stands before a "{" that opens a literal; any other one opens a block.
BEFORE_LITERAL = re.compile(r"(?:[=(\[{,:?|&+]|\b(?:return|in|yield))\s*\Z")
UNFINISHED = frozenset(":,=+&|")  # a line that ends so goes on in the next one
NEXT_LINE_BELONGS = re.compile(r"[ \t]*[)\]}{]")


def code_boundaries(draft: DraftText) -> list[int]:
    """After every line that ends a statement, or the closing brace of a block.

    A line does not end a statement inside a bracket or a triple-quoted string, after a
    backslash, operator or comma, when it opens a block (`if x:`, `{`) or holds only a
    decorator or a comment: those belong to what follows. A blank line closes brackets
    left open, so that a stray one costs little.
    """
    if not draft.newline_tokens:
        return []
    first_break = len(draft.previous_text)
    breaks = statement_ends(draft.text)
    return [draft.boundary_at(at + 1) for at in breaks if at >= first_break]


def statement_ends(text: str) -> list[int]:
    """Offsets of the line breaks that end a statement."""
    ends = []
    brackets: list[str] = []  # "(" for a bracket or literal, "{" for a block
    first = last = ""  # first and last visible character of the logical line
    is_blank = True
    pos = 0
    while item := ITEM.search(text, pos):
        kind, at, pos = item.lastgroup, item.start(), item.end()
        if kind == "newline":
            if is_blank:
                brackets.clear()
            if not (brackets and brackets[-1] == "(") and last not in UNFINISHED:
                opens_block = last == "{" or first == "@"
                if last and not opens_block and not NEXT_LINE_BELONGS.match(text, pos):
                    ends.append(at)
                first = last = ""
            is_blank = True
            continue
        is_blank = False
        if kind in ("comment", "joined"):
            continue
        last = text[pos - 1]
        first = first or text[at]
        if kind == "fence":
            brackets.clear()
            # An opening fence names a language and belongs to the code after it.
            last = "`" if item.group().strip(" \t`") == "" else ""
            first = ""
        elif kind == "triple" and BEFORE_TRIPLE.search(text[max(0, at - 80) : at]):
            close = text.find(item.group(), pos)
            pos = close + 3 if close >= 0 else len(text)
        elif kind == "open":
            is_literal = last != "{" or BEFORE_LITERAL.search(
                text[max(0, at - 80) : at]
            )
            brackets.append("(" if is_literal else "{")
        elif kind == "close" and brackets:
            brackets.pop()
    return ends
