"""Which parts of texts a draft model reads in one draft phase, and in one forward."""

from __future__ import annotations

from collections.abc import Sequence

# Missing tokens up to which a request is read whole in any draft phase.
SHORT_GAP = 64


def read_ends(spans: Sequence[tuple[int, int]], limit: int, *, lead: int) -> list[int]:
    """Up to where each span [start, end) is read in one draft phase: of long spans at
    most `limit` positions together, the first ones first.

    The last positions of a span, up to `lead` of them and at least one, are left to
    draft steps.
    """
    ends = []
    for start, end in spans:
        num = 0 if end - start <= lead else end - 1 - start
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
