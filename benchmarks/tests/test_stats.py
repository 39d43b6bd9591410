"""Statistics of the benchmark against published values, oracles and hand counts."""

import numpy as np
import pytest
from scipy.integrate import trapezoid

from benchmarks.harness.stats import (
    calibration_error,
    equivalence,
    judge_quality,
    paired_difference,
    reliability,
    roc_auc,
    roc_points,
    speed_ratio,
)


def test_paired_difference_counts_only_items_that_changed():
    base = [1] * 90 + [0] * 10
    ours = [0] * 5 + [1] * 85 + [0] * 10
    d = paired_difference(ours, base)
    assert (d.lost, d.gained, d.total, d.points) == (5, 0, 100, -5)
    assert d.mcnemar_p == pytest.approx(2 * 0.5**5)
    # Losses among resampled items are binomial (100, 0.05): 1 to 10 in 95%.
    assert (d.boot_low, d.boot_high) == pytest.approx((-10, -1), abs=0.5)
    assert -12 < d.low < d.boot_low and d.boot_high < 0
    assert paired_difference(ours, base) == d  # seeded
    same = paired_difference(base, base)
    assert same.mcnemar_p == 1 and (same.boot_low, same.boot_high) == (0, 0)
    assert same.low < 0 < same.high


def test_paired_difference_is_narrower_than_two_independent_intervals():
    right = [1] * 70 + [0] * 30
    d = paired_difference(right, right)
    assert (
        d.high - d.low < 8
    )  # two Wilson intervals of 70% differ by 12 points and more


def test_speed_ratio_is_of_sums_and_its_interval_of_items():
    slow = [1.0, 2.0, 3.0, 4.0]
    fast = [s / 2 for s in slow]
    assert speed_ratio([1] * 4, fast, [1] * 4, slow) == pytest.approx((2, 2, 2))
    ratio, low, high = speed_ratio([1] * 4, [1, 1, 1, 3], [1] * 4, slow)
    assert ratio == pytest.approx(10 / 6) and low < ratio < high
    # Twice the tokens in the same time.
    assert speed_ratio([2] * 4, slow, [1] * 4, slow)[0] == 2


SCORES = [0.95, 0.91, 0.6, 0.55, 0.3, 0.05]
VALID = [True, True, False, True, False, False]
FIRST = [False, False, True, False, False, False]


def test_judge_quality_by_hand():
    q = judge_quality(SCORES, VALID, FIRST, 0.58)
    assert (q.valid, q.invalid) == (3, 3)
    assert q.false_accept == pytest.approx(1 / 3)
    assert q.first_false_accept == 1
    assert q.false_reject == pytest.approx(1 / 3)
    assert q.auc == pytest.approx(8 / 9)
    all_valid = judge_quality([0.2], [True], [False], 0.5)
    assert all_valid.false_accept is None and all_valid.auc is None
    assert all_valid.false_reject == 1


def test_verdict_at_the_threshold_is_accepted():
    assert judge_quality([0.5], [False], [True], 0.5).false_accept == 1


def test_reliability_and_ece_by_hand():
    rows = reliability([0.05, 0.95, 1.0, 0.91], [False, True, True, False])
    assert rows == [
        (0.05, 0.0, 1),
        (pytest.approx(0.9533333), pytest.approx(2 / 3), 3),
    ]
    expected = (0.05 + 3 * (0.9533333 - 2 / 3)) / 4
    assert calibration_error(
        [0.05, 0.95, 1.0, 0.91], [False, True, True, False]
    ) == pytest.approx(expected)
    assert calibration_error([], []) is None


def test_auc_is_the_share_of_ordered_pairs_and_the_area_under_the_points():
    rng = np.random.default_rng(3)
    valid = rng.random(60) < 0.6
    scores = np.round(np.clip(rng.random(60) + 0.3 * valid, 0, 1), 1)  # with ties
    pairs = [(a > b) + 0.5 * (a == b) for a in scores[valid] for b in scores[~valid]]
    assert roc_auc(scores, valid) == pytest.approx(np.mean(pairs))
    points = roc_points(scores, valid)
    assert points[0][1:] == (0, 0) and points[-1][1:] == (1, 1)
    area = trapezoid([p[2] for p in points], [p[1] for p in points])
    assert area == pytest.approx(np.mean(pairs))


def test_equivalence_needs_both_bounds_within_the_margin():
    """Red if few prompts, or a change in one direction, count as equivalent, or if the
    bounds are not those of the two one-sided tests."""
    same = equivalence([True] * 200, [True] * 200)
    assert same.is_shown and same.low == pytest.approx(-same.high)
    assert same.high == pytest.approx(100 * (1 - 0.05 ** (1 / 200)))
    assert not equivalence([True] * 50, [True] * 50).is_shown
    for before, after in (((1, 0), (0, 1)), ((0, 1), (1, 0))):
        some = [bool(before[0])] * 12 + [True] * 188
        other = [bool(after[0])] * 12 + [True] * 188
        found = equivalence(some, other)
        assert not found.is_shown
        assert (found.low < -3) != (found.high > 3)
    both = equivalence([True, False] * 100, [False, True] + [True, False] * 99)
    assert both.is_shown and both.low == pytest.approx(-both.high)
    with pytest.raises(ValueError, match="no pairs"):
        equivalence([], [])


def test_equivalence_is_seldom_shown_at_the_margin():
    """Red if more than one in twenty pairs of arms that differ by the margin pass."""
    rng = np.random.default_rng(5)
    num, shown = 600, 0
    for _ in range(400):
        before = rng.random(num) < 0.9
        after = before & (rng.random(num) >= 0.03 / 0.9)
        shown += equivalence(before.tolist(), after.tolist()).is_shown
    assert shown / 400 < 0.08
