"""The text of segments, and where each stands in the text of the output."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from sglang_parse.reporting.segments import SegmentReport

# Tokens before a segment that its text is decoded behind; up to MAX_CONTEXT where
# fewer show no whole character, only parts (PART) or nothing.
CONTEXT = 16
MAX_CONTEXT = 64
PART = "\ufffd"


def with_text(
    segments: Sequence[SegmentReport],
    output_ids: Sequence[int],
    decode: Callable[[list[int]], str],
) -> list[dict[str, Any]]:
    """Segments as data, with their text and its place in the output text.

    A token may hold half a character, so a place is as many characters as the tokens
    before it decode to, and the text of a segment that stands in the output is cut out
    of the output's. A rejected one's is what its tokens add to those before it.
    """
    ids = list(output_ids)
    places = {len(ids)}
    for segment in segments:
        places.add(min(segment.start, len(ids)))
        if segment.outcome != "rejected":
            places.add(segment.start + len(segment.token_ids))
    text = decode(ids)
    at = _places(ids, sorted(places), decode, len(text))
    result = []
    for segment in segments:
        start, context = at[min(segment.start, len(ids))]
        if segment.outcome == "rejected":
            own = decode([*context, *segment.token_ids])[len(decode(context)) :]
        else:
            own = text[start : at[segment.start + len(segment.token_ids)][0]]
        result.append({**asdict(segment), "text": own, "text_start": start})
    return result


def _places(
    ids: Sequence[int],
    places: Sequence[int],
    decode: Callable[[list[int]], str],
    num_chars: int,
) -> dict[int, tuple[int, list[int]]]:
    """For each of the rising places: how many characters come before it, and as many of
    the tokens before it as it takes to decode what follows. num_chars: of all ids."""
    found = []
    context: list[int] = []
    at = left_out = 0  # left_out: characters before the context
    for place in places:
        context = [*context, *ids[at:place]]
        at = place
        text = decode(context)
        num_before = left_out + len(text)
        context, text = _shortened(context, text, decode)
        left_out = num_before - len(text)
        found.append((place, num_before, context))
    # Parts of a character may decode to more characters than the whole of it.
    result = {}
    for place, num_before, context in reversed(found):
        if place < len(ids):
            num_chars = min(num_chars, num_before)
        result[place] = num_chars, context
    return result


def _shortened(
    context: list[int], text: str, decode: Callable[[list[int]], str]
) -> tuple[list[int], str]:
    """The end of the context that is enough to decode what follows, and its text.

    It has to show a whole character: then neither a space at the start of what follows
    nor the rest of a character is decoded as if nothing came before.
    """
    size = CONTEXT
    while size < len(context):
        shown = decode(context[-size:])
        whole = shown.lstrip(PART)
        if whole and text.endswith(whole):
            return context[-size:], shown
        size *= 2
    if len(context) > MAX_CONTEXT:
        # Twice, as a space alone may decode to nothing.
        context = [token for token in context if decode([token, token])][-CONTEXT:]
        text = decode(context)
    return context, text
