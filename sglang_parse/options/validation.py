"""Checks of single values: each returns the value or raises a ValueError.

The message is one sentence: where the value stands (`field`, a flag or a field of a
request), the value, and what was expected.
"""

from __future__ import annotations

import difflib
import reprlib
from collections.abc import Iterable, Sequence
from typing import Any
from urllib.parse import urlsplit

# Stands for the answer so far in the judge's prompt (judging/prompt.py), so a question
# may not hold it. No chat template strips it; as it ends in a letter, it shares no
# token with what templates put after an answer.
CUT_MARK = "PARSE-CUT-MARK"
RECOVER_ALL = "all"
# Who may draft, in the order of their turns; the value that leaves it to other flags.
DRAFTER_NAMES = ("ngram", "eagle3", "mtp", "dflash", "dspark", "remote", "model")
AUTO = "auto"
# Where the API key of a draft server stands.
DRAFT_KEY_ENV = "SGLANG_PARSE_DRAFT_API_KEY"
MAX_RECOVER = 1024
# Longest client text. A token is several characters; contexts are shorter than this.
MAX_CLIENT_CHARS = 200_000
MAX_VERIFY_SEGMENTS = 256
MAX_TEXT_CHARS = 2000

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def shown(value: Any) -> str:
    """`value` as an error message shows it: one short line whatever a client sent."""
    return _short.repr(value)


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """What is added to an error about a misspelt name; "" if nothing is like it."""
    close = difflib.get_close_matches(name[:99], known, 1, 0.75)
    return f" (did you mean {close[0]}?)" if close else ""


def suggest_flags(parser: Any, known: Iterable[str], start: str = "-") -> None:
    """Have the parser's error about unknown flags that begin so name what is meant."""
    plain = parser.error

    def error(message: str) -> None:
        for word in message.partition("unrecognized arguments: ")[2].split():
            if word.startswith(start):
                message += did_you_mean(word.partition("=")[0], known)
        plain(message)

    parser.error = error


def refused(value: Any, field: str, expected: str) -> ValueError:
    """The error of a value. expected: without the full stop."""
    return ValueError(f"{field} is {shown(value)}; expected {expected}.")


def check_choice(value: Any, field: str, choices: Sequence[str]) -> str:
    if not isinstance(value, str) or value not in choices:
        raise refused(value, field, f"one of {', '.join(choices)}")
    return value


def check_number(value: Any, field: str, low: float, high: float) -> float:
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # NaN fails the comparison; integers too large for a float do not reach float().
    if not is_number or not low <= value <= high:
        raise refused(value, field, f"a number from {low:g} to {high:g}")
    return float(value)


def check_count(value: Any, field: str, low: int, high: int) -> int:
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not low <= value <= high:
        raise refused(value, field, f"a whole number from {low} to {high}")
    return int(value)


def check_flag(value: Any, field: str) -> bool:
    if not isinstance(value, bool):
        raise refused(value, field, "true or false")
    return value


def check_text(value: Any, field: str, max_chars: int = MAX_TEXT_CHARS) -> str:
    """Non-blank text. Lone surrogates, which JSON can carry and no tokenizer can
    encode, are no text."""
    is_text = isinstance(value, str) and value.strip() and len(value) <= max_chars
    if not is_text or any("\ud800" <= c <= "\udfff" for c in value):
        raise refused(value, field, f"non-empty text of at most {max_chars} characters")
    return value


def check_place(value: Any, field: str, expected: str) -> str:
    """Text, "" for none."""
    if not isinstance(value, str):
        raise refused(value, field, expected)
    return value


def check_name(value: Any, field: str) -> str:
    """A short name, "" for none."""
    return "" if value == "" else check_text(value, field, 200)


def check_question(value: Any, field: str) -> str:
    """A question that can be asked behind a draft."""
    question = check_text(value, field)
    if CUT_MARK in question:
        raise refused(value, field, f"text without {CUT_MARK!r}")
    return question


def parse_verdict_tokens(text: Any, field: str) -> tuple[tuple[str, str], ...]:
    """Split "Yes/No,yes/no" into (("Yes", "No"), ("yes", "no")); spaces count."""
    pairs = []
    for pair in text.split(",") if isinstance(text, str) else [""]:
        yes, slash, no = pair.partition("/")
        if not slash or not yes or not no or yes == no:
            raise refused(text, field, "pairs such as 'Yes/No' or 'Yes/No,yes/no'")
        pairs.append((yes, no))
    return tuple(pairs)


def check_url(value: Any, field: str) -> str:
    """An HTTP address, "" for none. A value with credentials is not shown again, not
    even in the message."""
    if value == "":
        return ""
    is_url = has_secrets = False
    try:
        parts = urlsplit(value if isinstance(value, str) else "")
        has_secrets = bool("@" in parts.netloc or parts.query or parts.fragment)
        known = parts.scheme in ("http", "https") and parts.port != 0
        is_url = known and bool(parts.hostname)
    except ValueError:
        pass
    if has_secrets:
        raise ValueError(
            f"{field} has credentials or a query; expected an address without, and the "
            f"API key in the environment variable {DRAFT_KEY_ENV}."
        )
    if not is_url or any(c.isspace() for c in value):
        raise refused(value, field, "an address such as 'http://localhost:30000/v1'")
    return str(value)


def check_drafters(value: Any, field: str) -> str:
    """The word "auto", or drafters in their order, each once."""
    names = value.split(",") if isinstance(value, str) else [""]
    if value != AUTO and names != [n for n in DRAFTER_NAMES if n in names]:
        expected = f"{AUTO!r}, or names among {', '.join(DRAFTER_NAMES)} in this order"
        raise refused(value, field, f"{expected}, separated by commas")
    return str(value)


def check_segments(value: Any, field: str) -> str | tuple[str, ...]:
    """A client's text as it is, or the list of its segments as a tuple."""
    if not isinstance(value, list):
        return check_text(value, field, MAX_CLIENT_CHARS)
    if not 1 <= len(value) <= MAX_VERIFY_SEGMENTS:
        raise ValueError(
            f"{field} has {len(value)} segments; expected 1 to {MAX_VERIFY_SEGMENTS}, "
            "or one text."
        )
    parts = [
        check_text(v, f"{field}[{i}]", MAX_CLIENT_CHARS) for i, v in enumerate(value)
    ]
    if (num := sum(map(len, parts))) > MAX_CLIENT_CHARS:
        raise ValueError(
            f"{field} has {num} characters; expected at most {MAX_CLIENT_CHARS}."
        )
    return tuple(parts)
