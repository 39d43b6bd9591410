"""The window policy on simulated costs."""

import pytest

from sglang_parse.window import (
    MIN_WINDOW,
    SHORT_WINDOW,
    RoundTiming,
    WindowController,
    draft_window,
    fit_windows,
    next_window,
)


def simulate(
    controller: WindowController,
    *,
    num_rounds: int,
    step_ms: float,
    verify_ms: float,
    plain_ms: float,
    keep,
    window: int = 64,
    bs: int = 1,
) -> tuple[float, float]:
    """Run rounds; returns (tokens per ms of the run, of plain decoding)."""
    tokens = ms = 0.0
    for _ in range(num_rounds):
        steps = min(window, controller.step_cap(bs))
        emitted = 1 + (keep(steps) if steps else 0)
        draft_ms = step_ms * steps
        rest_ms = verify_ms if steps else plain_ms
        controller.observe(RoundTiming(bs, steps, emitted * bs, draft_ms, rest_ms))
        tokens += emitted
        ms += draft_ms + rest_ms
    return tokens / ms, 1 / plain_ms


@pytest.mark.parametrize("verify_ms", [20, 100])
def test_controller_pauses_where_the_draft_is_hostile(verify_ms):
    """Red if a draft that is never kept costs much more than its probes may."""
    rate, plain = simulate(
        WindowController(500),
        num_rounds=2000,
        step_ms=1.2,
        verify_ms=verify_ms,
        plain_ms=12,
        keep=lambda steps: 0,
    )
    assert rate >= 0.93 * plain


def test_one_slow_probe_does_not_end_drafting():
    """Red if a probe that the machine held up pauses drafting for hours."""
    controller = WindowController(0)
    controller.observe(RoundTiming(4, 60, 4, draft_ms=9e6, verify_ms=9e6))
    controller.observe(RoundTiming(4, 0, 4, draft_ms=0.0, verify_ms=10.0))
    assert any(controller.step_cap(4) for _ in range(1100))


def test_probe_reaches_a_boundary():
    """Red if long segments keep a paused batch from seeing that verdicts pass."""
    controller = WindowController(0)
    timing = RoundTiming(4, 60, 4, draft_ms=60.0, verify_ms=40.0, segment_len=40.0)
    controller.observe(timing)
    controller.observe(RoundTiming(4, 0, 4, draft_ms=0.0, verify_ms=10.0))
    caps = [controller.step_cap(4) for _ in range(400)]
    assert caps[0] == 0
    assert next(cap for cap in caps if cap) == 80


def test_controller_keeps_drafting_where_it_pays():
    """Red if a good draft is paused more than its one comparison round."""
    controller = WindowController(500)
    rate, plain = simulate(
        controller,
        num_rounds=200,
        step_ms=1.2,
        verify_ms=20,
        plain_ms=12,
        keep=lambda steps: steps,
    )
    assert rate > 5 * plain


def test_controller_returns_after_the_draft_gets_better():
    controller = WindowController(0)
    costs = {"step_ms": 1.0, "verify_ms": 15.0, "plain_ms": 10.0}
    simulate(controller, num_rounds=60, keep=lambda steps: 0, **costs)
    rate, plain = simulate(controller, num_rounds=600, keep=lambda s: s, **costs)
    assert rate > 2 * plain


def test_controller_pauses_where_many_kept_tokens_cost_more_than_plain():
    """Red if only the number of kept tokens counts, not what they cost."""
    rate, plain = simulate(
        WindowController(0),
        num_rounds=2000,
        step_ms=5.0,
        verify_ms=200,
        plain_ms=20,
        keep=lambda steps: 10,
        bs=32,
    )
    assert rate >= 0.85 * plain


def test_step_cap_bounds_the_round_by_measured_costs():
    """Red if the cost of verifying a draft token is left out of the bound."""
    controller = WindowController(100)
    controller.observe(RoundTiming(1, 50, 50, draft_ms=100.0, verify_ms=100.0))
    assert controller.step_cap(1) == 25
    controller = WindowController(200)  # half of it with six requests
    assert controller.step_cap(6) > 1000
    controller.observe(RoundTiming(6, 50, 300, draft_ms=100.0, verify_ms=100.0))
    assert controller.step_cap(6) == 25
    controller.observe(RoundTiming(6, 0, 6, draft_ms=0.0, verify_ms=20.0))
    assert controller.step_cap(6) == 20
    for _ in range(20):
        controller.observe(RoundTiming(6, 50, 6000, draft_ms=900.0, verify_ms=900.0))
    assert controller.step_cap(6) == MIN_WINDOW


def test_new_batch_size_starts_with_a_probe_where_drafting_did_not_pay():
    controller = WindowController(0)
    costs = {"step_ms": 1.0, "verify_ms": 15.0, "plain_ms": 10.0}
    simulate(controller, num_rounds=20, keep=lambda steps: 0, bs=16, **costs)
    assert controller.step_cap(4) == SHORT_WINDOW


def test_controller_keeps_batch_sizes_apart():
    controller = WindowController(100)
    controller.observe(RoundTiming(16, 50, 800, draft_ms=500.0, verify_ms=400.0))
    assert controller.step_cap(16) == MIN_WINDOW
    assert controller.step_cap(1) > 1000


@pytest.mark.parametrize(
    ("window", "num_draft", "num_correct", "rejected_len", "expected"),
    [
        (0, 40, 40, 0, 0),
        (16, 16, 16, 0, 32),
        (0, 60, 24, 12, 18),
        (64, 60, 24, 2, MIN_WINDOW),
        (0, 60, 10, 0, 20),
        (0, 60, 0, 0, MIN_WINDOW),
        (24, 0, 0, 0, 24),
    ],
)
def test_next_window_follows_the_outcome(
    window, num_draft, num_correct, rejected_len, expected
):
    got = next_window(
        window, num_draft=num_draft, num_correct=num_correct, rejected_len=rejected_len
    )
    assert got == expected


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


def test_fit_windows_uses_the_room_and_no_more():
    windows = fit_windows([100, 10, 0], seq_lens=[5, 5, 5], held=[9, 9, 9], room=40)
    assert windows[1:] == [10, 0]
    missing = sum(max(0, 5 + 1 + w - 9) for w in windows)
    assert missing <= 30 < missing + 2


def test_fit_windows_leaves_windows_that_fit():
    assert fit_windows([50, 7], seq_lens=[1, 1], held=[4, 4], room=1000) == [50, 7]


def test_short_window_holds_a_probe():
    assert MIN_WINDOW <= SHORT_WINDOW
