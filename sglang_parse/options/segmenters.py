"""Names of segmenters: the built-in ones, `fixed:N`, and those of installed packages.

Only names are known here, so that flags and request fields can be checked without
the built-in rules, which are in judging/.
"""

from __future__ import annotations

from typing import Any

from sglang_parse.options.extensions import Extensions
from sglang_parse.options.validation import refused

SEGMENTERS = ("line", "paragraph", "sentence", "step", "code")
FIXED = "fixed"
SEGMENTER_EXTENSIONS = Extensions(
    "segmenter",
    built_in=(*SEGMENTERS, FIXED),
    expected="a function that takes a DraftText and returns token offsets",
)


def parse_fixed_segmenter(name: str) -> int | None:
    """Length N of a `fixed:N` segmenter, or None if `name` is not of that form."""
    kind, _, tail = name.partition(":")
    is_count = tail.isascii() and tail.isdigit() and len(tail) <= 7
    return int(tail) if kind == FIXED and is_count and int(tail) >= 1 else None


def check_segmenter(name: Any, field: str) -> str:
    """Return `name` if it names a segmenter; ValueError names `field` otherwise."""
    if isinstance(name, str):
        if name in SEGMENTERS or parse_fixed_segmenter(name) is not None:
            return name
        if SEGMENTER_EXTENSIONS.check(name, field):
            return name
    names = ", ".join((*SEGMENTERS, *SEGMENTER_EXTENSIONS.names()))
    raise refused(name, field, f"one of {names} or fixed:N with N >= 1")
