"""How many boundaries there are to a verdict, from what was measured."""

import math
import random

import pytest

from sglang_parse.spacing import MAX_EVERY, MIN_PASSES, PRIOR, JudgeSpacing

SUFFIX, SEGMENT = 14, 12.0


def spacing(
    *, base_ms=10.0, row_ms=0.2, draft_ms=0.25, wrong_every=300, noise=0.0, seed=0
) -> JudgeSpacing:
    """After 200 rounds on such a machine, with a verdict failing so rarely."""
    rng = random.Random(seed)
    found = JudgeSpacing()
    for _ in range(200):
        rows = rng.randint(60, 700)
        cost = base_ms + row_ms * rows
        found.observe_pass(rows, cost * (1 + noise * rng.random()))
        found.observe_draft(200, 200 * draft_ms)
        failures = sum(rng.random() < 50 / wrong_every for _ in range(4))
        found.observe_verdicts(200, failures)
    return found


def every(found: JudgeSpacing) -> int:
    return found.every(suffix_len=SUFFIX, segment_len=SEGMENT)


@pytest.mark.parametrize("noise", [0.0, 0.5])
@pytest.mark.parametrize("row_ms", [0.0, 0.01, 0.2])
def test_the_cost_of_a_row_is_the_slope(row_ms, noise):
    """Red if a pass's fixed cost counts as one of its rows."""
    found = spacing(row_ms=row_ms, noise=noise).row_ms
    assert found == pytest.approx(row_ms * (1 + noise / 2), rel=0.25, abs=0.006)


def test_one_pass_that_was_held_up_changes_little():
    """Red if a neighbour's second of work makes rows look dear, or free."""
    found = spacing()
    for rows in (60, 700):
        found.observe_pass(rows, 5000.0)
    assert found.row_ms == pytest.approx(0.2, rel=0.5)


def test_suffixes_are_rarer_where_rows_are_dear_and_failures_are_rare():
    """Red if every boundary is judged whatever it costs, or one that costs nothing is
    not."""
    assert every(spacing(row_ms=0.0)) == 1
    assert every(spacing(row_ms=0.001, draft_ms=2.0)) == 1
    assert every(spacing(wrong_every=60)) <= 2
    assert every(spacing(wrong_every=10_000)) == MAX_EVERY


def test_the_distance_is_youngs():
    """Red if the distance is not sqrt(2 * cost of a verdict / rate of failures), with
    the cost in units of what a lost token costs."""
    found = spacing(row_ms=0.02, draft_ms=0.5, wrong_every=150)
    rate = found._failures / found._tokens
    row_ms = found.row_ms
    verdict = SUFFIX * row_ms
    token = row_ms + 0.5 + verdict / SEGMENT
    distance = math.sqrt(2 * verdict / (rate * token))
    assert every(found) == max(1, round(distance / SEGMENT))


def test_before_it_has_seen_enough_every_boundary_is_judged():
    """Red if a server's first requests are judged by a guess."""
    found = JudgeSpacing()
    assert every(found) == 1
    for rows in range(MIN_PASSES - 1):
        found.observe_pass(100 + rows, 20.0 + rows)
    assert found.row_ms is None and every(found) == 1
    assert found.every(suffix_len=SUFFIX, segment_len=0.0) == 1
    assert (found._failures, found._tokens) == PRIOR


def test_drafts_that_are_wrong_again_are_judged_closely_again():
    """Red if what was learned of an easy task outlives it."""
    found = spacing(wrong_every=10_000)
    assert every(found) == MAX_EVERY
    for _ in range(60):
        found.observe_verdicts(100, 8)
    assert every(found) == 1
