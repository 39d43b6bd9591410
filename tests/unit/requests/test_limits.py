"""The windows of requests: what bounds them, how they follow the outcome."""

import pytest

from sglang_parse.requests.limits import (
    draft_window,
    fit_windows,
)


@pytest.mark.parametrize(
    ("asked", "num_remaining", "num_positions", "expected"),
    [(256, 100, 1000, 99), (0, 100, 1000, 99), (8, 100, 1000, 8), (8, 100, 3, 3)]
    + [(8, 1, 50, 0), (8, 5, -2, 0), (0, 0, 5, 0)],
)
def test_draft_window_is_the_smallest_limit(
    asked, num_remaining, num_positions, expected
):
    got = draft_window(asked, num_remaining=num_remaining, num_positions=num_positions)
    assert got == expected


ROWS = 10_000


def test_fit_windows_uses_the_room_and_no_more():
    windows = fit_windows(
        [100, 10, 0], seq_lens=[5, 5, 5], held=[9, 9, 9], room=40, max_rows=ROWS
    )
    assert windows[1:] == [10, 0]
    missing = sum(max(0, 5 + 1 + w - 9) for w in windows)
    assert missing <= 30 < missing + 2


def test_fit_windows_leaves_windows_that_fit():
    fields = {"seq_lens": [1, 1], "held": [4, 4], "room": 1000, "max_rows": ROWS}
    assert fit_windows([50, 7], **fields) == [50, 7]


def test_a_pass_is_no_longer_than_a_prefill():
    """Red if drafts of many requests, or one long text, outgrow the memory that is left
    for activations."""
    held = [10_000] * 48
    windows = fit_windows(
        [256] * 48, seq_lens=[5] * 48, held=held, room=ROWS, max_rows=2048
    )
    assert windows == [32] * 48
    (window,) = fit_windows(
        [50_000], seq_lens=[5], held=[0], room=1 << 20, max_rows=8192
    )
    assert window == 6144
