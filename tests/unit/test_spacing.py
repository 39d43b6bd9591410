"""How many boundaries there are to a verdict, from what was measured."""

import math
import random

import pytest

from sglang_parse.spacing import MAX_EVERY, MIN_PASSES, JudgeSpacing, PassCost

SUFFIX, SEGMENT = 14, 12.0


def test_passes_of_one_length_say_nothing_of_a_row():
    """Red if noise over next to no spread becomes the cost of a row, without bound."""
    cost = passes(PassCost(), 40)
    noise = random.Random(1)
    for _ in range(3000):
        cost.observe(40, 18 + noise.uniform(-2, 2))
        assert cost.row_ms < 1


def passes(cost: PassCost, num: int, *, row_ms=0.2, base_ms=10.0, noise=0.0, seed=0):
    rng = random.Random(seed)
    for _ in range(num):
        rows = rng.randint(60, 700)
        held = 1 + noise * rng.random()
        cost.observe(rows, (base_ms + row_ms * rows) * held)
    return cost


def spacing(
    *, row_ms=0.2, draft_ms=0.25, wrong_every=300, noise=0.0, seed=0
) -> JudgeSpacing:
    """After 200 rounds of four requests, with a verdict failing so rarely."""
    rng = random.Random(seed)
    found = JudgeSpacing()
    passes(found._passes[2], 200, row_ms=row_ms, noise=noise, seed=seed)
    for _ in range(200):
        found.observe_draft(200, 200 * draft_ms)
        failures = sum(rng.random() < 50 / wrong_every for _ in range(4))
        found.observe_verdicts(200, failures)
    return found


def every(found: JudgeSpacing, bs: int = 4) -> int:
    return found.every(bs, suffix_len=SUFFIX, segment_len=SEGMENT)


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("row_ms", [0.0, 0.01, 0.2])
def test_the_cost_of_a_row_is_the_slope(row_ms, noise):
    """Red if a pass's fixed cost counts as one of its rows."""
    found = passes(PassCost(), 200, row_ms=row_ms, noise=noise).row_ms
    assert found == pytest.approx(row_ms * (1 + noise / 2), rel=0.25, abs=0.006)


@pytest.mark.parametrize("rows", [60, 700])
def test_one_pass_that_was_held_up_changes_little(rows):
    """Red if a neighbour's seconds of work make rows look dear, or free."""
    cost = passes(PassCost(), 200)
    cost.observe(rows, 5000.0)
    assert cost.row_ms == pytest.approx(0.2, rel=0.5)


@pytest.mark.parametrize("rows", [60, 700])
def test_a_kernels_first_use_is_not_the_cost_of_its_rows(rows):
    """Red if a compiling first pass decides how closely a server judges."""
    cost = PassCost()
    cost.observe(rows, 5000.0)
    passes(cost, 40)
    assert cost.row_ms == pytest.approx(0.2, rel=0.5)


def test_suffixes_are_rarer_where_rows_are_dear_and_failures_are_rare():
    """Red if every boundary is judged whatever it costs."""
    assert every(spacing(wrong_every=60)) <= 2
    assert every(spacing(wrong_every=10_000)) == MAX_EVERY


@pytest.mark.parametrize("seed", range(8))
def test_where_rows_are_free_every_boundary_is_judged(seed):
    """Red if noise in the times of passes leaves verdicts out that cost nothing."""
    free = spacing(row_ms=0.0, draft_ms=7.0, noise=0.2, wrong_every=1e9, seed=seed)
    assert every(free) == 1
    assert every(spacing(row_ms=0.001, draft_ms=2.0, wrong_every=1e9)) == 1


def test_the_distance_is_youngs():
    """Red if the distance is not sqrt(2 * cost of a verdict / rate of failures), with
    the cost in units of what a lost token costs."""
    for wrong_every in (40, 150, 400):
        found = spacing(row_ms=0.06, draft_ms=0.5, wrong_every=wrong_every)
        verdict = SUFFIX * 0.06
        token = 0.06 + 0.5 + verdict / SEGMENT
        distance = math.sqrt(2 * verdict / (found.failure_rate * token))
        expected = min(max(1, round(distance / SEGMENT)), MAX_EVERY)
        assert every(found) == expected
        assert found.failure_rate == pytest.approx(1 / wrong_every, rel=0.3)


def test_before_it_has_seen_enough_every_boundary_is_judged():
    """Red if a server's first requests, or its first at another load, are judged by a
    guess."""
    found = JudgeSpacing()
    assert every(found) == 1
    passes(found._passes[2], MIN_PASSES - 1)
    assert every(found) == 1
    found = spacing(wrong_every=10_000)
    assert (every(found), every(found, 5), every(found, 1)) == (MAX_EVERY, MAX_EVERY, 1)
    assert found.every(4, suffix_len=SUFFIX, segment_len=0.0) == 1
    assert found.every(4, suffix_len=0, segment_len=SEGMENT) == 1


def test_drafts_that_are_wrong_again_are_judged_closely_again():
    """Red if what was learned of an easy task outlives it."""
    found = spacing(wrong_every=10_000)
    assert every(found) == MAX_EVERY
    for _ in range(60):
        found.observe_verdicts(100, 8)
    assert every(found) == 1


def test_a_server_that_never_fails_serves_on():
    """Red if a rate that decays to nothing stops the scheduler: with a threshold of 0
    no verdict can fail."""
    found = spacing(wrong_every=1e9)
    for _ in range(40_000):
        found.observe_verdicts(100, 0)
    assert every(found) == MAX_EVERY
    assert found.failure_rate > 1e-5
