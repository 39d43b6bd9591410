"""Bounds of the accuracy that one setting loses against another. Pure."""

from __future__ import annotations

import math

from scipy.stats import beta, norm

from sglang_parse.demo.figures import Z95


def tango_interval(
    gained: int, lost: int, total: int, z: float = Z95
) -> tuple[float, float]:
    """Score interval of a difference of paired shares (Tango 1998, Stat. Med. 17).

    The bounds are the differences whose score statistic is -z and z. They are found by
    bisection.
    """

    def score(delta: float) -> float:
        # Restricted maximum-likelihood share of losses given the difference.
        a = 2.0 * total
        b = -gained - lost + (2 * total - gained + lost) * delta
        c = -lost * delta * (1 - delta)
        q = (math.sqrt(max(0.0, b * b - 4 * a * c)) - b) / (2 * a)
        variance = total * (2 * q + delta * (1 - delta))
        distance = gained - lost - total * delta
        if variance <= 0:
            return math.copysign(math.inf, distance) if distance else 0.0
        return distance / math.sqrt(variance)

    def bound(goal: float) -> float:
        low, high = -1.0, 1.0  # the score falls as delta rises
        for _ in range(60):
            middle = (low + high) / 2
            if score(middle) > goal:
                low = middle
            else:
                high = middle
        return (low + high) / 2

    return bound(z), bound(-z)


def loss_bound(lost: int, gained: int, total: int, confidence: float) -> float:
    """One-sided upper bound of the accuracy lost, in points.

    It is the score bound. If nothing was gained it is at least the exact binomial bound
    (Clopper and Pearson 1934), because the score bound is too low for few losses.
    """
    low, _ = tango_interval(gained, lost, total, float(norm.ppf(confidence)))
    bound = -low
    if gained == 0:
        bound = max(bound, upper_bound(lost, total, confidence) or 0.0)
    return 100 * bound


def upper_bound(num: int, total: int, confidence: float = 0.95) -> float | None:
    """One-sided exact bound of a share; None if the total is 0."""
    if not total:
        return None
    return 1.0 if num == total else float(beta.ppf(confidence, num + 1, total - num))
