"""Bounds of a loss against published formulas and a numerical oracle."""

import math

import pytest
from scipy.optimize import minimize_scalar

from sglang_parse.calibrate.loss_bounds import loss_bound, tango_interval
from sglang_parse.demo.figures import Z95


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


def test_loss_bound_follows_the_rule_of_three():
    assert loss_bound(0, 0, 598, 0.95) <= 0.5 < loss_bound(0, 0, 597, 0.95)
    assert loss_bound(1, 0, 598, 0.95) > 0.75
    assert loss_bound(10, 0, 10, 0.95) == 100
    assert loss_bound(3, 3, 1000, 0.95) < loss_bound(3, 0, 1000, 0.95)
