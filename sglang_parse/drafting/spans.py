"""Which parts of long texts a draft model reads in one round, and in one forward."""

from __future__ import annotations

from collections.abc import Sequence

# Missing tokens up to which a request is read whole in any round.
SHORT_GAP = 64


def read_ends(spans: Sequence[tuple[int, int]], limit: int) -> list[int]:
    """Up to where each span [start, end) is read in one round: short ones whole, of the
    others at most `limit` positions together, the first ones first."""
    ends = []
    for start, end in spans:
        num = end - start
        if num > SHORT_GAP:
            num = min(num, limit)
            limit -= num
        ends.append(start + num)
    return ends


def split_spans(
    spans: Sequence[tuple[int, int]], limit: int
) -> list[list[tuple[int, int, int]]]:
    """Spans [start, end), request by request, in batches of at most `limit` positions:
    (request, start, end) each. A request's last part comes in the order of requests."""
    batches: list[list[tuple[int, int, int]]] = [[]]
    left = limit
    for i, (at, end) in enumerate(spans):
        while at < end:
            if not left:
                batches.append([])
                left = limit
            num = min(end - at, left)
            batches[-1].append((i, at, at + num))
            at, left = at + num, left - num
    return batches
