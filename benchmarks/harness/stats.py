"""Statistics of paired answers, of speed and of the judge. Pure."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from scipy.stats import binomtest, rankdata

from sglang_parse.calibrate.loss_bounds import loss_bound, tango_interval, upper_bound
from sglang_parse.demo.figures import Z95

RESAMPLES = 10_000
SEED = 20260521
NUM_BINS = 10
Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class PairedDifference:
    """Accuracy of an arm minus the baseline's on the same items, in points.

    low, high: 95% score interval (Tango 1998), which is not empty where the answers
    never differ; where items are right in a share of their repeats, no narrower than
    the bootstrap's.
    boot_low, boot_high: 95% paired bootstrap. mcnemar_p: exact, two sides. lost,
    gained: items right less often now than before, and more often.
    """

    points: float
    low: float
    high: float
    boot_low: float
    boot_high: float
    mcnemar_p: float
    lost: int
    gained: int
    total: int


def paired_difference(
    right: Sequence[float], base_right: Sequence[float]
) -> PairedDifference:
    """right, base_right: 0/1, or shares over repeats, of the same items in the same
    order. Not empty."""
    ours, theirs = np.asarray(right, float), np.asarray(base_right, float)
    lost = int((ours < theirs).sum())
    gained = int((ours > theirs).sum())
    n = len(ours)
    low, high = tango_interval(gained, lost, n)
    boot = resampled(lambda rows: float((ours - theirs)[rows].mean()), n)
    if np.any((ours % 1) != 0) or np.any((theirs % 1) != 0):
        low, high = min(low, boot[0]), max(high, boot[1])
    p = binomtest(lost, lost + gained).pvalue if lost + gained else 1.0
    return PairedDifference(
        points=100 * float((ours - theirs).mean()),
        low=100 * low,
        high=100 * high,
        boot_low=100 * boot[0],
        boot_high=100 * boot[1],
        mcnemar_p=float(p),
        lost=lost,
        gained=gained,
        total=n,
    )


@dataclass(frozen=True)
class Equivalence:
    """Two one-sided tests (TOST, Schuirmann 1987) that a share of answers changes by
    less than `margin` points either way.

    low, high: bounds of the change in points, each of the tests' confidence.
    """

    low: float
    high: float
    margin: float

    @property
    def is_shown(self) -> bool:
        return -self.margin < self.low and self.high < self.margin


def equivalence(
    before: Sequence[bool],
    after: Sequence[bool],
    *,
    margin: float = 3.0,
    confidence: float = 0.95,
) -> Equivalence:
    """Whether answers have a property, such as being refused, as often as before.

    before, after: of the same prompts. Raises ValueError if their numbers differ or
    there are none.
    """
    pairs = list(zip(before, after, strict=True))
    if not pairs:
        raise ValueError("equivalence() has no pairs; expected at least one.")
    lost, gained = pairs.count((True, False)), pairs.count((False, True))
    return Equivalence(
        low=-loss_bound(lost, gained, len(pairs), confidence),
        high=loss_bound(gained, lost, len(pairs), confidence),
        margin=margin,
    )


def resampled(
    statistic: Callable[[Array], float],
    num_items: int,
    *,
    resamples: int = RESAMPLES,
    seed: int = SEED,
) -> tuple[float, float]:
    """95% percentile bootstrap of `statistic`, which takes row numbers."""
    rng = np.random.default_rng(seed)
    rows = rng.integers(0, num_items, size=(resamples, num_items))
    values = np.array([statistic(r) for r in rows])
    low, high = np.quantile(values, [0.025, 0.975])
    return float(low), float(high)


def speed_ratio(
    amounts: Sequence[float],
    seconds: Sequence[float],
    base_amounts: Sequence[float],
    base_seconds: Sequence[float],
) -> tuple[float, float, float]:
    """(ratio, low, high) of two arms' amounts per second on the same items.

    seconds: latency of each item. At a fixed number of requests in flight throughput
    is that number over the mean latency (Little), so it cancels. The interval is a
    paired bootstrap over items: what other items of the kind would give, not what
    another hour on the machine would.
    """
    a, s, b, t = (
        np.asarray(v, float) for v in (amounts, seconds, base_amounts, base_seconds)
    )
    rng = np.random.default_rng(SEED)
    rows = rng.integers(0, len(a), size=(RESAMPLES // 5, len(a)))
    ratios = (a[rows].sum(1) / s[rows].sum(1)) / (b[rows].sum(1) / t[rows].sum(1))
    low, high = np.quantile(ratios, [0.025, 0.975])
    return (
        float((a.sum() / s.sum()) / (b.sum() / t.sum())),
        float(low),
        float(high),
    )


@dataclass(frozen=True)
class JudgeQuality:
    """Verdicts against gold over judged prefixes; shares are None of nothing.

    false_accept: invalid prefixes that passed. first_false_accept: the same among
    prefixes that are the first invalid one of their draft. false_reject: valid ones
    that failed. *_high: exact upper bounds at 95% confidence (Clopper and Pearson
    1934), which hold for independent verdicts; invalid prefixes of a draft contain one
    another, so that of the first ones is the one to read. ece: expected calibration
    error over ten equal bins. auc: chance that a valid prefix scores above an invalid
    one.
    """

    valid: int
    invalid: int
    first_invalid: int
    false_accept: float | None
    first_false_accept: float | None
    false_reject: float | None
    first_false_accept_high: float | None
    false_reject_high: float | None
    ece: float | None
    auc: float | None


def judge_quality(
    scores: Sequence[float],
    valid: Sequence[bool],
    first_invalid: Sequence[bool],
    threshold: float,
) -> JudgeQuality:
    """scores: of judged prefixes. valid: gold. first_invalid: see JudgeQuality."""
    s = np.asarray(scores, float)
    v, f = np.asarray(valid, bool), np.asarray(first_invalid, bool)
    passes = s >= threshold

    def share(of: Array, among: Array) -> float | None:
        return float((of & among).sum() / among.sum()) if among.any() else None

    return JudgeQuality(
        valid=int(v.sum()),
        invalid=int((~v).sum()),
        first_invalid=int(f.sum()),
        false_accept=share(passes, ~v),
        first_false_accept=share(passes, f),
        false_reject=share(~passes, v),
        first_false_accept_high=upper_bound(int((passes & f).sum()), int(f.sum())),
        false_reject_high=upper_bound(int((~passes & v).sum()), int(v.sum())),
        ece=calibration_error(scores, valid),
        auc=roc_auc(scores, valid),
    )


def reliability(
    scores: Sequence[float], valid: Sequence[bool], num_bins: int = NUM_BINS
) -> list[tuple[float, float, int]]:
    """(mean score, share valid, count) of the bins that hold something."""
    s, v = np.asarray(scores, float), np.asarray(valid, float)
    bins = np.minimum((s * num_bins).astype(int), num_bins - 1)
    rows = []
    for b in range(num_bins):
        inside = bins == b
        if inside.any():
            mean, share = float(s[inside].mean()), float(v[inside].mean())
            rows.append((mean, share, int(inside.sum())))
    return rows


def calibration_error(scores: Sequence[float], valid: Sequence[bool]) -> float | None:
    """Expected calibration error: |share valid - mean score| weighted by count."""
    if not len(scores):
        return None
    rows = reliability(scores, valid)
    return sum(n * abs(share - mean) for mean, share, n in rows) / len(scores)


def roc_auc(scores: Sequence[float], valid: Sequence[bool]) -> float | None:
    """Area under the ROC curve by ranks (Mann and Whitney 1947); ties count half."""
    v = np.asarray(valid, bool)
    num_valid, num_invalid = int(v.sum()), int((~v).sum())
    if not num_valid or not num_invalid:
        return None
    ranks = rankdata(np.asarray(scores, float))
    above = ranks[v].sum() - num_valid * (num_valid + 1) / 2
    return float(above / (num_valid * num_invalid))


def roc_points(
    scores: Sequence[float], valid: Sequence[bool]
) -> list[tuple[float, float, float]]:
    """(threshold, false accepts, true accepts) as shares, from strict to lenient."""
    s, v = np.asarray(scores, float), np.asarray(valid, bool)
    points = [(math.inf, 0.0, 0.0)]
    for threshold in sorted(set(s.tolist()), reverse=True):
        passes = s >= threshold
        points.append((threshold, passes[~v].mean().item(), passes[v].mean().item()))
    return points


def wilson_interval(num_right: float, total: int) -> tuple[float, float]:
    """95% score interval of a share (Wilson 1927); (0, 1) of nothing."""
    if total == 0:
        return 0.0, 1.0
    share, z2 = num_right / total, Z95 * Z95
    center = share + z2 / (2 * total)
    spread = Z95 * math.sqrt(share * (1 - share) / total + z2 / (4 * total * total))
    scale = 1 + z2 / total
    return max(0.0, (center - spread) / scale), min(1.0, (center + spread) / scale)
