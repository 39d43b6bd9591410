"""Segmenters of installed packages: loaded once, and checked at each use."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any

from sglang_parse.judging.draft_text import DraftText
from sglang_parse.options.extensions import ExtensionError
from sglang_parse.options.segmenters import SEGMENTER_EXTENSIONS

#: Where a draft is cut: offsets after its tokens, rising, from 1 to the number of them.
SegmentRule = Callable[[DraftText], Iterable[int]]


def load_rule(name: str) -> SegmentRule:
    """The rule of an installed package.

    It raises ExtensionError on a draft where the package's own function raises, or
    returns anything but rising offsets. Raises ValueError if it cannot be loaded.
    """
    one = SEGMENTER_EXTENSIONS.found[name]
    rule: SegmentRule = one.make(lambda found: checked_rule(one.name, found))
    return rule


def checked_rule(name: str, found: Any) -> SegmentRule:
    """The function found, whose errors are those of the extension `name`."""

    def boundaries(draft: DraftText) -> list[int]:
        try:
            return rising_offsets(found(draft), len(draft.pieces))
        except Exception as e:
            raise ExtensionError("segmenter", name, "failed on a draft") from e

    return boundaries


def rising_offsets(values: Iterable[Any], most: int) -> list[int]:
    """The values as ints. Raises unless they are whole numbers that rise from at least
    1 to at most `most`; a list that never ends is left at the first bad one."""
    offsets: list[int] = []
    last = 0
    for value in values:
        if isinstance(value, bool):
            raise TypeError(f"offset {value!r} is no whole number")
        offset = operator.index(value)
        if not last < offset <= most:
            raise ValueError(
                f"offset {offset} comes behind {last} in a draft of {most} tokens; "
                "expected offsets that rise to the number of tokens at most"
            )
        offsets.append(offset)
        last = offset
    return offsets
