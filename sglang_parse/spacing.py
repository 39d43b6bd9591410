"""How far apart the judged boundaries of a draft lie.

A judge suffix is a checkpoint. It costs rows of the pass; without it a failing verdict
further on takes more of the draft with it. Where failures are rare, the best distance
between checkpoints is sqrt(2 * cost / rate of failures), cost in units of the work that
one token is (J. W. Young, A first order approximation to the optimum checkpoint
interval, CACM 17(9), 1974). All of it is measured while serving. Where suffixes cost
next to nothing, as on a GPU with few requests, every boundary is judged.
"""

from __future__ import annotations

import math
from collections import defaultdict
from statistics import median

# No verdict answers for more segments than this unless a setting says so.
MAX_EVERY = 3
# Suffixes that cost a smaller share of the work than this are not worth leaving out.
WORTH = 0.05
# Passes before their cost a row is known.
MIN_PASSES = 8
# Weight of a new pass, once there are many.
SMOOTHING = 0.03
# What a round's verdicts and drafts still count for after the next one.
MEMORY = 0.98
# Failures and judged tokens added to what was seen: a draft that is wrong every fifth
# segment or so, until verdicts say otherwise.
PRIOR = (1.0, 64.0)
# A pass that took more than this many times what its rows explain was held up.
HELD_UP = 2.0


class PassCost:
    """What passes of one batch size cost: a line through their times over their rows.

    Its slope is the cost of a row; what a pass costs whatever its rows is not.
    """

    def __init__(self) -> None:
        self._first: list[tuple[int, float]] = []
        self._num = 0
        self._rows = self._ms = 0.0  # means, and below their (co)variances
        self._var_rows = self._cov = 0.0

    def observe(self, num_rows: int, pass_ms: float) -> None:
        if self._num:
            expected = self._ms + self.row_ms * (num_rows - self._rows)
            self._add(num_rows, min(pass_ms, HELD_UP * max(expected, self._ms)))
            return
        self._first.append((num_rows, pass_ms))
        if len(self._first) == MIN_PASSES:
            # A kernel's first use takes seconds.
            most = HELD_UP * median(ms for _, ms in self._first)
            for rows, ms in self._first:
                self._add(rows, min(ms, most))

    def _add(self, num_rows: int, pass_ms: float) -> None:
        self._num += 1
        weight = max(SMOOTHING, 1 / self._num)
        rows, ms = num_rows - self._rows, pass_ms - self._ms
        self._rows += weight * rows
        self._ms += weight * ms
        self._var_rows = (1 - weight) * (self._var_rows + weight * rows * rows)
        self._cov = (1 - weight) * (self._cov + weight * rows * ms)

    @property
    def row_ms(self) -> float:
        """Milliseconds that one more row adds to a pass; 0 while unknown, as it is
        where passes have as good as the same number of rows."""
        return max(0.0, self._cov / self._var_rows) if self._var_rows >= 1 else 0.0


class JudgeSpacing:
    """Learns what rows, draft tokens and failing verdicts cost."""

    def __init__(self) -> None:
        self._passes: defaultdict[int, PassCost] = defaultdict(PassCost)
        self._draft_ms = self._drafted = 0.0
        self._failures = self._tokens = 0.0

    def observe_pass(self, bs: int, num_rows: int, pass_ms: float) -> None:
        """A pass with judge suffixes, num_rows rows of bs requests, took pass_ms."""
        self._passes[_key(bs)].observe(num_rows, pass_ms)

    def observe_draft(self, num_tokens: int, draft_ms: float) -> None:
        """A draft loop gave num_tokens tokens, of all requests, in draft_ms."""
        self._drafted = MEMORY * self._drafted + num_tokens
        self._draft_ms = MEMORY * self._draft_ms + draft_ms

    def observe_verdicts(self, num_tokens: int, num_failures: int) -> None:
        """Verdicts of a round. num_tokens: draft tokens up to the last verdict that
        counted. num_failures: requests in which one failed."""
        self._tokens = MEMORY * self._tokens + num_tokens
        self._failures = MEMORY * self._failures + num_failures

    @property
    def failure_rate(self) -> float:
        """Failing verdicts a judged draft token."""
        failures, tokens = PRIOR
        return (self._failures + failures) / (self._tokens + tokens)

    def every(self, bs: int, *, suffix_len: int, segment_len: float) -> int:
        """Judge at every so-manieth boundary, 1 to MAX_EVERY.

        bs: requests. suffix_len: tokens of a judge suffix. segment_len: mean tokens of
        a segment.
        """
        row_ms = self._passes[_key(bs)].row_ms
        if not row_ms or segment_len <= 0:
            return 1
        suffix_ms = suffix_len * row_ms
        # A token that is lost is drafted, forwarded and judged once more.
        token_ms = row_ms + suffix_ms / segment_len
        token_ms += self._draft_ms / self._drafted if self._drafted else 0.0
        if suffix_ms / segment_len < WORTH * token_ms:
            return 1
        tokens = math.sqrt(2 * suffix_ms / (self.failure_rate * token_ms))
        return min(max(1, round(tokens / segment_len)), MAX_EVERY)


def _key(bs: int) -> int:
    """Batch sizes that are taken together."""
    return round(math.log2(bs))
