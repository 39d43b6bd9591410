"""Whether, how long and how: the controller of rounds on simulated costs."""

import dataclasses

import pytest

from sglang_parse.pace import (
    FIRST_PAUSE,
    LONGEST_PAUSE,
    RoundController,
    RoundLimits,
    RoundTiming,
)
from sglang_parse.window import MIN_WINDOW, SHORT_WINDOW, next_window


def steps(controller: RoundController, bs: int) -> int:
    return controller.limits(bs, ways={True}).steps


def simulate(
    controller: RoundController,
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
        num = min(window, steps(controller, bs))
        emitted = 1 + (keep(num) if num else 0)
        draft_ms = step_ms * num
        rest_ms = verify_ms if num else plain_ms
        controller.observe(RoundTiming(bs, num, emitted * bs, draft_ms, rest_ms))
        tokens += emitted
        ms += draft_ms + rest_ms
    return tokens / ms, 1 / plain_ms


@pytest.mark.parametrize("verify_ms", [20, 100])
def test_controller_pauses_where_the_draft_is_hostile(verify_ms):
    """Red if a draft that is never kept costs much more than its probes may."""
    rate, plain = simulate(
        RoundController(500),
        num_rounds=2000,
        step_ms=1.2,
        verify_ms=verify_ms,
        plain_ms=12,
        keep=lambda steps: 0,
    )
    assert rate >= 0.93 * plain


def test_slow_rounds_do_not_end_drafting():
    """Red if one round that the machine held up, such as a kernel's first, pauses
    drafting for long, or a few of them for hours."""
    controller = RoundController(0)
    for longest in (FIRST_PAUSE, LONGEST_PAUSE, LONGEST_PAUSE):
        controller.observe(RoundTiming(4, 60, 4, draft_ms=9e6, verify_ms=9e6))
        controller.observe(RoundTiming(4, 0, 4, draft_ms=0.0, verify_ms=10.0))
        assert not steps(controller, 4)
        assert any(steps(controller, 4) for _ in range(longest))


def test_probe_reaches_a_boundary():
    """Red if long segments keep a paused batch from seeing that verdicts pass."""
    controller = RoundController(0)
    timing = RoundTiming(4, 60, 4, draft_ms=60.0, verify_ms=40.0, segment_len=40.0)
    controller.observe(timing)
    controller.observe(RoundTiming(4, 0, 4, draft_ms=0.0, verify_ms=10.0))
    caps = [steps(controller, 4) for _ in range(400)]
    assert caps[0] == 0
    assert next(cap for cap in caps if cap) == 80


def test_controller_keeps_drafting_where_it_pays():
    """Red if a good draft is paused more than its one comparison round."""
    controller = RoundController(500)
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
    controller = RoundController(0)
    costs = {"step_ms": 1.0, "verify_ms": 15.0, "plain_ms": 10.0}
    simulate(controller, num_rounds=60, keep=lambda steps: 0, **costs)
    rate, plain = simulate(controller, num_rounds=600, keep=lambda s: s, **costs)
    assert rate > 2 * plain


def test_controller_pauses_where_many_kept_tokens_cost_more_than_plain():
    """Red if only the number of kept tokens counts, not what they cost."""
    rate, plain = simulate(
        RoundController(0),
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
    controller = RoundController(100)
    controller.observe(RoundTiming(1, 50, 50, draft_ms=100.0, verify_ms=100.0))
    assert steps(controller, 1) == 25
    controller = RoundController(200)  # half of it with six requests
    assert steps(controller, 6) > 1000
    controller.observe(RoundTiming(6, 50, 300, draft_ms=100.0, verify_ms=100.0))
    assert steps(controller, 6) == 25
    controller.observe(RoundTiming(6, 0, 6, draft_ms=0.0, verify_ms=20.0))
    assert steps(controller, 6) == 20
    for _ in range(20):
        controller.observe(RoundTiming(6, 50, 6000, draft_ms=900.0, verify_ms=900.0))
    assert steps(controller, 6) == MIN_WINDOW


def test_a_kernels_first_use_bounds_one_round_alone():
    """Red if a first round of seconds keeps drafts short until its mean has faded."""
    controller = RoundController(max_round_ms=500)
    controller.observe(RoundTiming(1, 20, 21, 15000, 5000))
    assert steps(controller, 1) == MIN_WINDOW
    controller.observe(RoundTiming(1, 20, 21, 20, 20))
    assert steps(controller, 1) > 100


def test_new_batch_size_starts_with_a_probe_where_drafting_did_not_pay():
    controller = RoundController(0)
    costs = {"step_ms": 1.0, "verify_ms": 15.0, "plain_ms": 10.0}
    simulate(controller, num_rounds=20, keep=lambda steps: 0, bs=16, **costs)
    assert steps(controller, 4) == SHORT_WINDOW


def test_controller_keeps_batch_sizes_apart():
    controller = RoundController(100)
    controller.observe(RoundTiming(16, 50, 800, draft_ms=500.0, verify_ms=400.0))
    assert steps(controller, 16) == steps(controller, 1) == MIN_WINDOW
    controller.observe(RoundTiming(1, 8, 8, draft_ms=8.0, verify_ms=8.0))
    assert steps(controller, 16) == MIN_WINDOW
    assert steps(controller, 1) == 50


def two_ways(
    controller: RoundController, costs, *, num_rounds: int, bs: int = 8, ways=None
) -> tuple[float, float]:
    """Rounds of costs[judged] = (ms, tokens); (tokens per ms, share of judged ones)."""
    controller.observe(RoundTiming(bs, 0, bs, draft_ms=0.0, verify_ms=30.0))
    ms = tokens = judged = 0.0
    for _ in range(num_rounds):
        limits = controller.limits(bs, ways=ways or {True, False})
        assert limits.steps
        round_ms, given = costs[limits.judged]
        controller.observe(
            RoundTiming(bs, 16, given * bs, 0.0, round_ms, judged=limits.judged)
        )
        ms, tokens, judged = ms + round_ms, tokens + given, judged + limits.judged
    return tokens / ms, judged / num_rounds


@pytest.mark.parametrize("judged_ms", [150, 40])
def test_the_better_way_to_verify_is_taken(judged_ms):
    """Red if verdicts are asked for where following the draft token by token gives
    more, or are given up where they give more, or if trying costs much."""
    costs = {True: (judged_ms, 10), False: (60, 6)}
    rate, share = two_ways(RoundController(500), costs, num_rounds=600)
    best = max(tokens / ms for ms, tokens in costs.values())
    assert rate > 0.95 * best
    assert share > 0.9 if judged_ms == 40 else share < 0.1


def test_verdicts_return_when_they_pay_again():
    """Red if a batch that once followed its drafts token by token never looks back."""
    controller = RoundController(500)
    two_ways(controller, {True: (150, 10), False: (60, 6)}, num_rounds=100)
    _, share = two_ways(controller, {True: (60, 10), False: (60, 6)}, num_rounds=2000)
    assert share > 0.6


def test_a_trial_that_gives_far_less_is_short():
    """Red if a lone request pays a whole trial where verdicts are plainly better."""
    costs = {True: (100, 25), False: (45, 7)}
    rate, share = two_ways(RoundController(500), costs, num_rounds=60, bs=1)
    assert share >= 1 - 4 / 60  # one trial
    assert rate > 0.97 * 25 / 100


def test_a_way_never_taken_is_bounded_by_what_is_known():
    """Red if the first judged round of a large batch is as long as the response because
    only rounds of the other way, or of another batch size, were measured."""
    controller = RoundController(100)
    controller.observe(RoundTiming(1, 10, 10, 50.0, 50.0, judged=False))
    assert controller.limits(1, ways={True}).steps == 10
    assert controller.limits(32, ways={True}).steps == MIN_WINDOW


def test_bound_leaves_a_judged_round_long_enough_to_reach_a_boundary():
    """Red if under load most drafts end inside their first segment: they cost a round
    and cannot be judged."""
    controller = RoundController(100)
    timing = RoundTiming(8, 10, 80, 200.0, 200.0, segment_len=12.0)
    controller.observe(timing)
    controller.observe(dataclasses.replace(timing, segment_len=0.0, judged=False))
    assert controller.limits(8, ways={True}) == RoundLimits(18, True)
    assert controller.limits(8, ways={False}) == RoundLimits(MIN_WINDOW, False)


def test_waiting_requests_shorten_a_round_as_running_ones_do():
    """Red if a request in the queue waits behind rounds as long as without it."""
    controller = RoundController(100)
    controller.observe(RoundTiming(1, 10, 10, 5.0, 5.0))
    alone = controller.limits(1, ways={True}).steps
    crowded = controller.limits(1, ways={True}, num_waiting=5).steps
    assert (alone, crowded) == (100, 50)


def test_trials_end_early_where_plain_decoding_gives_more():
    """Red if a hostile draft is tried at length: verdicts keep nothing either."""
    controller = RoundController(500)
    controller.observe(RoundTiming(16, 0, 16, draft_ms=0.0, verify_ms=40.0))
    drafted = 0
    for _ in range(60):
        limits = controller.limits(16, ways={True, False})
        ms = 150.0 if limits.steps else 40.0
        drafted += bool(limits.steps)
        timing = RoundTiming(16, limits.steps, 16, 0.0, ms, judged=limits.judged)
        controller.observe(timing)
    assert drafted <= 4


def test_the_other_way_is_tried_before_drafting_is_given_up():
    """Red if a batch decodes without drafts where only its verdicts did not pay."""
    controller = RoundController(500)
    costs = {True: (400.0, 10), False: (60.0, 6)}
    controller.observe(RoundTiming(8, 0, 8, draft_ms=0.0, verify_ms=30.0))
    seen = []
    for _ in range(150):
        limits = controller.limits(8, ways={True, False})
        seen.append((limits.steps > 0, limits.judged))
        ms, tokens = costs[limits.judged] if limits.steps else (30.0, 1)
        num = min(limits.steps, 16)
        controller.observe(
            RoundTiming(8, num, tokens * 8, 0.0, ms, judged=limits.judged)
        )
    assert (False, True) in seen  # paused
    assert seen[-30:] == [(True, False)] * 30


def test_a_new_batch_size_begins_the_way_its_neighbour_goes():
    """Red if every batch size learns from nothing that verdicts are dear."""
    controller = RoundController(500)
    two_ways(controller, {True: (150, 10), False: (60, 6)}, num_rounds=100, bs=16)
    assert not controller.limits(32, ways={True, False}).judged
    assert controller.limits(16, ways={True}).judged


def test_little_difference_changes_nothing():
    """Red if the two ways take turns on noise alone."""
    costs = {True: (100, 10), False: (95, 10)}
    _, share = two_ways(RoundController(500), costs, num_rounds=600)
    assert share > 0.9


@pytest.mark.parametrize("only", [True, False])
def test_one_way_alone_is_never_left(only):
    """Red if a batch that cannot be followed, or not judged, is so for a trial."""
    costs = {only: (1000, 40)}
    _, share = two_ways(RoundController(0), costs, num_rounds=50, ways={only})
    assert share == only


def test_a_judged_window_reaches_a_boundary():
    """Red if a rejection leaves a window shorter than the segments that follow."""
    controller = RoundController(0)
    assert controller.least_window(judged=True) == MIN_WINDOW
    timing = RoundTiming(4, 60, 4, draft_ms=60.0, verify_ms=40.0, segment_len=20.0)
    controller.observe(timing)
    assert controller.least_window(judged=True) == 30
    assert controller.least_window(judged=False) == MIN_WINDOW
    short = {"num_draft": 60, "num_correct": 4, "least": 30}
    assert next_window(0, rejected_len=5, **short) == 30
    assert next_window(0, rejected_len=0, **short) == 30
