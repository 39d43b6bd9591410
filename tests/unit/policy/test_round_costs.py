"""Costs of rounds, fitted to their times."""

import random

import pytest

from sglang_parse.policy.curves import FIXED_STEPS, Curve
from sglang_parse.policy.round_costs import CostModel


def test_a_curve_goes_through_what_was_measured():
    """Red if a pass that costs the same up to some rows is not told from one whose
    rows cost."""
    curve = Curve()
    for _ in range(4):
        for rows in (8, 60, 160, 640, 1280):
            curve.add(rows, max(20.0, 3 + 0.1 * rows))
    for rows in (8, 100, 160, 640, 1280):
        assert curve.ms(rows) == pytest.approx(max(20.0, 3 + 0.1 * rows), rel=0.05)


def test_a_kernels_first_use_is_forgotten():
    """Red if seconds of compilation decide how later rounds run."""
    curve = Curve()
    curve.add(64, 3000.0)
    curve.add(64, 20.0)
    assert curve.ms(64) == pytest.approx(20.0)
    curve.add(64, 900.0)  # held up later
    assert curve.ms(64) < 45.0


def test_what_was_not_tried_looks_cheap_enough_to_try():
    """Red if a cost that was never measured keeps a server from measuring it."""
    curve = Curve()
    curve.add(64, 40.0)
    curve.add(64, 40.0)
    assert 20.0 < curve.ms(32) < 40.0
    assert 40.0 < curve.ms(128) < 80.0


def test_a_short_draft_that_was_never_timed_looks_short():
    """Red if plain rounds rewrite what failed for good, because a draft of four tokens
    is taken to cost half of the long ones that were timed."""
    costs = CostModel().at(1)
    for _ in range(3):
        costs.draft.add(128, 300.0)
    assert costs.draft.ms(4) < 30.0
    assert costs.draft.ms(256) < 600.0


def test_a_first_plain_round_concludes_nothing():
    """Red if plain decoding is given up for good for its first, slow round."""
    costs = CostModel()
    for _ in range(3):
        costs.at(1).draft.add(16, 16.0)
        costs.at(1).verify.add(40, 20.0)
    costs.at(1).plain.add(1, 2000.0)
    assert costs.plain_ms(1) <= 20.0
    for _ in range(2):
        costs.at(1).plain.add(1, 12.0)
    assert costs.plain_ms(1) == pytest.approx(12.0)


def test_a_plain_step_costs_its_share_of_what_lies_between_rounds():
    """Red if Python between rounds counts for nothing, or in full for each step of a
    long round; or if nothing is known of a step until two plain rounds were seen."""
    costs = CostModel()
    own = costs.at(1)
    assert costs.step_ms(1) == 0.0
    for _ in range(3):
        own.draft.add(16, 16.0)
        own.verify.add(1, 30.0)
    assert costs.step_ms(1) == pytest.approx(30.0)
    for _ in range(3):
        own.plain.add(1, 20.0)
        own.around.add(1, 10.0)
    assert costs.step_ms(1) == pytest.approx(20.0)
    assert costs.plain_ms(1, 1) == pytest.approx(30.0)
    assert costs.plain_ms(1) == pytest.approx(21.0)  # ten steps in 200 ms


def test_work_that_is_hidden_costs_nothing():
    """Red if rounds look as if the device waited between them, where a step ran beside
    the host's work; or if a round on its own looks as if it did not."""
    costs = CostModel()
    own = costs.at(1)
    for hides in (False, False, True, True):
        # A step of 20 ms, of which 8 ms pass before the host looks.
        steps_ms, around_ms = (12.0, 8.0) if hides else (20.0, 8.0)
        own.add_plain(1, steps_ms, around_ms, 1, hides=hides)
    assert costs.plain_ms(1) == pytest.approx(20.0)
    assert costs.plain_ms(1, 1) == pytest.approx(28.0)


def test_a_single_plain_round_does_not_tell_what_rounds_in_a_row_hide():
    """Red if plain rounds look slower than drafts that are slower than they are, since
    the two that were timed alone hid nothing."""
    costs = CostModel(runs_ahead=True)
    own = costs.at(1)
    for _ in range(2):
        own.add_plain(1, 20.0, 8.0, 1, hides=False, is_first=True)
    assert costs.plain_ms(1) == pytest.approx(20.0)
    own.add_plain(1, 20.0, 8.0, 1, hides=False)
    assert costs.plain_ms(1) == pytest.approx(20.8)


def test_rounds_that_mostly_read_say_nothing_of_steps():
    """Red if a draft that is tried seldom, and then reads thousands of tokens, looks
    dearer with each trial: what they take is never known exactly."""
    own, rng = CostModel().at(8), random.Random(0)
    for k in range(60):
        num_read = rng.randrange(500) if k < 40 else rng.randrange(6000, 9000)
        own.add_draft(4, num_read, 30.0 + 0.13 * num_read * rng.uniform(0.9, 1.1))
    assert own.draft.ms(4) == pytest.approx(30.0, rel=0.2)


def test_a_slow_start_is_brought_down_by_later_rounds():
    """Red if the seconds that kernels' first uses take stay the cost of short passes,
    which are never made again."""
    curve = Curve()
    for rows, ms in ((28, 3600.0), (5, 7100.0), (4, 6000.0)):
        curve.add(rows, ms)
    curve.add(100, 20.0)
    assert all(curve.ms(rows) <= 20.0 for rows in (4, 8, 28, 60, 100))


def test_a_machine_that_was_busy_does_not_spoil_what_is_not_used_since():
    """Red if long drafts, timed beside a neighbour, stay dear after it has left, as
    only short ones are timed anew."""
    costs = CostModel()

    def spend(slower: float, steps: int, times: int) -> None:
        for _ in range(times):
            costs.at(1).draft.add(steps, slower * steps)
            costs.at(1).verify.add(2 * steps, slower * (20 + 0.2 * steps))

    for steps in (24, 96):
        spend(3.0, steps, 4)
    spend(1.0, 24, 12)
    own = costs.at(1)
    assert own.draft.ms(24) == pytest.approx(24, rel=0.1)
    assert own.draft.ms(96) == pytest.approx(96, rel=0.2)
    assert own.draft.ms(96) / own.draft.ms(24) == pytest.approx(4, rel=0.25)


def test_slowness_does_not_drift_while_one_kind_of_work_is_done():
    """Red if thousands of plain rounds make all other work look dearer or cheaper, so
    that a slower way is taken then."""
    costs, rng = CostModel(), random.Random(0)
    own = costs.at(8)
    for _ in range(8):
        own.verify.add(40, 30.0)
    for _ in range(6000):
        own.plain.add(8, 16.0 * rng.lognormvariate(0, 0.3))
    assert own.verify.ms(40) == pytest.approx(30.0, rel=0.12)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("windows", [(8, 12, 16, 32), (16,)])
def test_drafts_are_timed_where_every_round_reads_prompts(seed, windows):
    """Red if prompts count as slow drafting, or if nothing is learnt beside them: at
    many requests with short answers no round is without one."""
    own, rng = CostModel().at(32), random.Random(seed)
    for k in range(40):
        steps = rng.choice(windows)
        num_read = 1600 if k == 0 else 50 * rng.randrange(1, 12)
        ms = (2.0 * steps + 0.04 * num_read) * rng.lognormvariate(0, 0.05)
        own.add_draft(steps, num_read, ms)
    for steps in windows:
        assert own.draft.ms(steps) == pytest.approx(2.0 * steps, rel=0.15)
    assert own.reading_ms(1000) == pytest.approx(40.0, rel=0.25)


def test_reading_is_not_told_from_drafting_by_rounds_that_do_both_alike():
    """Red if the time of the steps is taken for reading where long drafts happened to
    begin with long prompts: windows would be far too long."""
    own = CostModel().at(8)
    for steps, num_read in ((32, 800), (16, 400), (8, 200), (24, 600), (12, 300)):
        own.add_draft(steps, num_read, 2.0 * steps)
    assert own.draft.ms(16) == pytest.approx(32.0, rel=0.1)


def test_a_token_or_two_tell_nothing_of_what_prompts_cost():
    """Red if noise of rounds that read next to nothing becomes a price of prompts."""
    own, rng = CostModel().at(8), random.Random(1)
    for _ in range(200):
        noise = rng.lognormvariate(0, 0.1)
        own.add_draft(rng.choice((12, 16)), rng.randrange(3), 32.0 * noise)
    assert own.reading_ms(800) < 100.0
    own.add_draft(16, 800, 64.0)
    assert own.draft.ms(16) == pytest.approx(32.0, rel=0.15)


def test_a_short_draft_that_was_held_up_is_left_out():
    """Red if a first draft of 78 ms makes all shorter than the next look dear."""
    curve = Curve(fixed=FIXED_STEPS)
    curve.add(4, 78.0)
    for _ in range(4):
        curve.add(8, 19.0)
        curve.add(12, 25.0)
    assert curve.ms(4) < 15.0


def test_a_pass_of_few_rows_looks_as_cheap_as_a_plain_round():
    """Red if windows that are shorter than all that were tried look too dear to try."""
    own = CostModel().at(32)
    for _ in range(4):
        own.verify.add(400, 60.0)
    assert own.verify.ms(216) > 45.0
    for _ in range(4):
        own.plain.add(32, 20.0)
    assert own.verify.ms(216) == pytest.approx(40.0, rel=0.02)
    assert own.verify.ms(8) >= 20.0


def test_before_drafts_are_timed_they_are_compared_with_plain_steps():
    """Red if a draft of which nothing is known looks a hundred times as fast as a
    target whose steps take long, or slower than one whose steps are short."""
    costs = CostModel()
    assert costs.nearest(4).draft.ms(12) == pytest.approx(12.0)
    costs.at(1).plain.add(1, 60.0)
    assert costs.nearest(4).draft.ms(12) == pytest.approx(60.0)
    assert costs.nearest(4).verify.ms(1) == pytest.approx(60.0, rel=0.01)
