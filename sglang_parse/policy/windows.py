"""How many tokens each request drafts in a round.

What is left of the response, and the free KV slots. How much pays is goodput.py.
"""

from __future__ import annotations

from collections.abc import Sequence

MIN_WINDOW = 8
# Longest draft of a round that also holds requests decoding token by token: they get
# one token a round, so the round must be short. Also the least length of a probe.
SHORT_WINDOW = 16


def draft_window(asked: int, *, num_remaining: int, num_positions: int) -> int:
    """Draft tokens a request may hold; the bonus token takes the last output place.

    asked: the window setting, 0 for the whole response. num_remaining: output tokens
    left. num_positions: positions left for draft tokens and a suffix behind them.
    """
    return max(0, min(asked or num_remaining, num_remaining - 1, num_positions))


def fit_windows(
    windows: Sequence[int],
    *,
    seq_lens: Sequence[int],
    held: Sequence[int],
    room: int,
    max_rows: int,
) -> list[int]:
    """Shrink windows until their slots fit the pool and their rows one pass, the
    longest first.

    held: slots each row has already. room: free slots, and max_rows: rows of a pass, of
    which a quarter is left for judge suffixes.
    """
    room, max_rows = room * 3 // 4, max_rows * 3 // 4

    def fits(cap: int) -> bool:
        rows = [min(w, cap) for w in windows]
        missing = (
            max(0, n + 1 + w - h) for w, n, h in zip(rows, seq_lens, held, strict=True)
        )
        return sum(missing) <= room and sum(rows) <= max_rows

    low, high = 0, max(windows, default=0)
    while low < high:
        middle = (low + high + 1) // 2
        if fits(middle):
            low = middle
        else:
            high = middle - 1
    return [min(w, low) for w in windows]
