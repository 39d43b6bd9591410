"""Statistics of the benchmark against published values, oracles and hand counts."""

import math

import numpy as np
import pytest
from scipy.integrate import trapezoid
from scipy.optimize import minimize_scalar

from sglang_parse.bench.figures import Z95
from sglang_parse.bench.stats import (
    calibration_error,
    judge_quality,
    loss_bound,
    paired_difference,
    reliability,
    roc_auc,
    roc_points,
    speed_ratio,
    tango_interval,
)


def score_at(gained, lost, total, delta):
    """The score statistic with the restricted maximum found numerically."""

    def loss(q):  # q: share of losses; gains are q + delta
        gain, rest = q + delta, 1 - 2 * q - delta
        value = (total - gained - lost) * math.log(max(rest, 1e-300))
        value += lost * math.log(max(q, 1e-300)) if lost else 0
        value += gained * math.log(max(gain, 1e-300)) if gained else 0
        return -value

    low, high = max(0.0, -delta), (1 - delta) / 2
    q = minimize_scalar(
        loss, bounds=(low, high), method="bounded", options={"xatol": 1e-10}
    ).x
    variance = total * (2 * q + delta * (1 - delta))
    return (gained - lost - total * delta) / math.sqrt(variance)


@pytest.mark.parametrize(
    ("gained", "lost", "total"), [(1, 7, 50), (0, 3, 200), (12, 2, 44), (5, 5, 30)]
)
def test_tango_bounds_are_where_the_score_is_the_quantile(gained, lost, total):
    low, high = tango_interval(gained, lost, total)
    assert low < (gained - lost) / total < high
    assert score_at(gained, lost, total, low) == pytest.approx(Z95, abs=2e-3)
    assert score_at(gained, lost, total, high) == pytest.approx(-Z95, abs=2e-3)


def test_tango_interval_mirrors_and_is_open_without_differences():
    low, high = tango_interval(2, 9, 100)
    assert tango_interval(9, 2, 100) == pytest.approx((-high, -low))
    # Both bounds solve n d^2 = z^2 (|d| - d^2): |d| = z^2 / (n + z^2).
    bound = Z95**2 / (200 + Z95**2)
    assert tango_interval(0, 0, 200) == pytest.approx((-bound, bound), abs=1e-9)


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


def test_loss_bound_follows_the_rule_of_three():
    assert loss_bound(0, 0, 598, 0.95) <= 0.5 < loss_bound(0, 0, 597, 0.95)
    assert loss_bound(1, 0, 598, 0.95) > 0.75
    assert loss_bound(10, 0, 10, 0.95) == 100
    assert loss_bound(3, 3, 1000, 0.95) < loss_bound(3, 0, 1000, 0.95)


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
