"""Kinds of values: how one is checked, read from a flag, and described."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_parse.options import validation as checks
from sglang_parse.options.judge_names import QUESTION_JUDGE, check_judge
from sglang_parse.options.segmenters import SEGMENTERS, check_segmenter


@dataclass(frozen=True)
class Kind:
    """What values an option takes."""

    #: Returns the value, or raises a ValueError that begins with the given place.
    check: Callable[[Any, str], Any]
    #: The allowed values in words, in Markdown.
    values: str
    #: Placeholder of the value in --help; "" for a switch, which takes none.
    metavar: str
    #: From the text behind a flag to the value that `check` sees.
    read: Callable[[str], Any] = str


def whole(low: int, high: int, *, metavar: str = "N") -> Kind:
    """A whole number in [low, high]."""
    check = partial(checks.check_count, low=low, high=high)
    return Kind(check, f"{low:,} to {high:,}", metavar, int)


def number(low: float, high: float) -> Kind:
    """A number in [low, high]."""
    check = partial(checks.check_number, low=low, high=high)
    return Kind(check, f"{low:g} to {high:g}", "X", float)


def choice(names: Sequence[str], *, metavar: str = "NAME") -> Kind:
    """One of a few words."""
    check = partial(checks.check_choice, choices=names)
    return Kind(check, _listed(names), metavar)


def client_text() -> Kind:
    """Text of a client, as long as a response."""
    check = partial(checks.check_text, max_chars=checks.MAX_CLIENT_CHARS)
    return Kind(check, f"text, at most {checks.MAX_CLIENT_CHARS:,} characters", "TEXT")


def or_word(kind: Kind, word: str) -> Kind:
    """A value of `kind`, or this word."""

    def check(value: Any, field: str) -> Any:
        if value == word:
            return word
        try:
            return kind.check(value, field)
        except ValueError as error:
            told = str(error).removesuffix(".")
            raise ValueError(f"{told} or {word!r}.") from None

    def read(text: str) -> Any:
        try:
            return kind.read(text)
        except ValueError:
            return text  # `check` decides

    return Kind(check, f"{kind.values}, or `{word}`", kind.metavar, read)


def place(values: str, metavar: str) -> Kind:
    """A path or a name, as text."""
    return Kind(partial(checks.check_place, expected=values), values, metavar)


def _listed(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


SWITCH = Kind(checks.check_flag, "`true`, `false`", "")
SEGMENTER = Kind(
    check_segmenter,
    f"{_listed(SEGMENTERS)}, `fixed:N`, or one of an installed package",
    "NAME",
)
JUDGE = Kind(
    check_judge, f"{_listed([QUESTION_JUDGE])}, or one of an installed package", "NAME"
)
QUESTION = Kind(
    checks.check_question, f"text, at most {checks.MAX_TEXT_CHARS:,} characters", "TEXT"
)
VERDICT_PAIRS = Kind(
    checks.parse_verdict_tokens, "`YES/NO` pairs, separated by commas", "PAIRS"
)
DRAFTERS = Kind(
    checks.check_drafters,
    f"`{checks.AUTO}`, or names among {_listed(checks.DRAFTER_NAMES)} in this order, "
    "separated by commas",
    "NAMES",
)
URL = Kind(checks.check_url, "an address such as `http://localhost:30000/v1`", "URL")
NAME = Kind(checks.check_name, "text, at most 200 characters", "NAME")
PATH = place("a folder or a Hugging Face name", "PATH")
SEGMENT_COUNT = or_word(whole(0, checks.MAX_RECOVER), checks.RECOVER_ALL)
SEGMENTS = Kind(
    checks.check_segments,
    f"text, or a list of 1 to {checks.MAX_VERIFY_SEGMENTS} texts; at most "
    f"{checks.MAX_CLIENT_CHARS:,} characters",
    "TEXT",
)
