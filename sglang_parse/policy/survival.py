"""How long something lasts, token by token: drafts, agreement, segments.

Pure. Lengths are counted in bins, and each bin has a chance a token to end there. What
is seen only in part (a draft that was cut off while it still agreed) counts for as long
as it was seen.

What ends early is seen for a few tokens only, and would hardly count beside thousands
that came before. What lasts long again is seen seldom, as nobody drafts much then. So
sum tests (CUSUM) compare the latest lengths with what was expected of them. Once ends
come clearly faster or more slowly, what came before counts no more.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import deque
from collections.abc import Callable
from itertools import pairwise

#: First token of each bin, from 0 on.
STARTS = (
    0,
    1,
    2,
    3,
    4,
    6,
    8,
    12,
    16,
    24,
    32,
    48,
    64,
    96,
    128,
    192,
    256,
    384,
    512,
    1024,
)
# Weight that the mean chance has in each bin, in tokens.
SMOOTHING = 8.0
# Tokens after which what was seen counts for half, as a rule.
MEMORY = 4096.0
# How many times faster, or more slowly, ends come where a test is made to see it. The
# evidence for that, as the log of a likelihood ratio, at which it is believed.
CHANGE, EVIDENCE = 3.0, 10.0
# Latest lengths that are kept in mind meanwhile.
LATEST = 64


class _Test:
    """Whether ends come so many times as often as they did.

    evidence: log of the likelihood ratio for that, not below 0. latest: the lengths
    since it was 0, with whether they ended. before: the chances to end then, by bin.
    """

    def __init__(self, times: float) -> None:
        self._times = times
        self.clear()

    def clear(self) -> None:
        self.evidence = 0.0
        self.latest: deque[tuple[int, bool]] = deque(maxlen=LATEST)
        self.before: list[float] = []

    def look(
        self, length: int, ended: bool, chances: Callable[[], list[float]]
    ) -> bool:
        """Whether it is believed now. chances: to end, by bin, as they are known."""
        self.before = self.before or chances()
        expected = sum(num * self.before[k] for k, num in parts(length + ended))
        self.evidence += ended * math.log(self._times) - (self._times - 1) * expected
        if self.evidence <= 0:
            self.clear()
            return False
        self.latest.append((length, ended))
        return self.evidence > EVIDENCE


class Survival:
    """Chance that something is longer than so many tokens.

    prior: chance a token to end, before anything is seen; weight: tokens it counts
    for. by_length: whether the chance differs with the length; else it is one for all.
    memory: tokens after which what was seen counts for half.
    """

    def __init__(
        self,
        prior: float,
        *,
        weight: float = 32.0,
        by_length: bool = True,
        memory: float = MEMORY,
    ) -> None:
        self._prior = prior
        self._weight = weight
        self._by_length = by_length
        self._memory = memory
        self._ends = [0.0] * len(STARTS)
        self._seen = [0.0] * len(STARTS)
        self._tests = (_Test(CHANGE), _Test(1 / CHANGE))
        #: What follows from the counts, until they change.
        self._rate: float | None = None
        self._bins: list[tuple[float, float, float, float]] = []

    def observe(self, length: int, *, ended: bool) -> None:
        """It lasted `length` tokens. ended: whether the next one ended it."""
        believed = [t for t in self._tests if t.look(length, ended, self._chances)]
        if believed:
            # What came before no longer holds.
            self.forget(0.0)
            for latest in believed[0].latest:
                self._add(*latest)
            for test in self._tests:
                test.clear()
        else:
            self._add(length, ended)
        self._limit()

    def _add(self, length: int, ended: bool) -> None:
        for k, num in parts(length + ended):
            self._seen[k] += num
        if ended:
            self._ends[bisect_right(STARTS, length) - 1] += 1

    def count(self, num_tokens: int, num_ends: int) -> None:
        """So many ended in so many tokens, whatever their lengths."""
        self._seen[0] += num_tokens
        self._ends[0] += num_ends
        self._limit()

    def _limit(self) -> None:
        if sum(self._seen) > self._memory:
            self.forget(0.5)
        self._rate, self._bins = None, []

    def forget(self, share: float) -> None:
        """Let what was seen count for this share of what it did."""
        self._ends = [share * x for x in self._ends]
        self._seen = [share * x for x in self._seen]
        self._rate, self._bins = None, []

    @property
    def num_seen(self) -> float:
        """Tokens that count now."""
        return sum(self._seen)

    @property
    def num_ends(self) -> float:
        """Ends among them."""
        return sum(self._ends)

    @property
    def rate(self) -> float:
        """Chance a token to end, over all lengths."""
        if self._rate is None:
            ends = sum(self._ends) + self._prior * self._weight
            self._rate = ends / (sum(self._seen) + self._weight)
        return self._rate

    def survive(self, num: float) -> float:
        """Chance that it is longer than `num` tokens."""
        return math.exp(-self._sums(num)[0])

    def mean(self, num: float) -> float:
        """Tokens that it lasts on average, cut off at `num`."""
        return self._sums(num)[1]

    def _sums(self, num: float) -> tuple[float, float]:
        """-log of the chance to be longer than num, and the mean up to it."""
        if num <= 0:
            return 0.0, 0.0
        if not self._bins:
            self._bins = self._sum_up()
        k = bisect_left(STARTS, num) - 1
        log, mean, hazard, per_end = self._bins[k]
        log_here = hazard * (num - STARTS[k])
        # Tokens of this bin that are reached: a geometric sum, one by one.
        here = math.exp(-log) * (1 - math.exp(-log_here)) * per_end
        return log + log_here, mean + here

    def _sum_up(self) -> list[tuple[float, float, float, float]]:
        """Of each bin: `_sums` at its start, and two figures of its chance."""
        bins, log, mean = [], 0.0, 0.0
        for k, (start, end) in enumerate(pairwise((*STARTS, 1 << 30))):
            chance = self._chance(k)
            hazard, per_end = -math.log1p(-chance), (1 - chance) / chance
            bins.append((log, mean, hazard, per_end))
            reached = 1 - math.exp(-hazard * (end - start))
            mean += math.exp(-log) * reached * per_end
            log += hazard * (end - start)
        return bins

    def _chances(self) -> list[float]:
        return [self._chance(k) for k in range(len(STARTS))]

    def _chance(self, k: int) -> float:
        rate = self.rate
        if self._by_length:
            ends = self._ends[k] + SMOOTHING * rate
            rate = ends / (self._seen[k] + SMOOTHING)
        return min(max(rate, 1e-6), 0.999)


def parts(num: int) -> list[tuple[int, int]]:
    """The bins that the first `num` tokens lie in, and how many in each."""
    return [
        (k, min(num, end) - start)
        for k, (start, end) in enumerate(pairwise((*STARTS, 1 << 30)))
        if start < num
    ]
