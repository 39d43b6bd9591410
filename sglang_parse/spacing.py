"""How far apart the judged boundaries of a draft lie.

A judge suffix is a checkpoint. It costs rows of the pass; without it a failing verdict
further on takes more of the draft with it. Where failures are rare, the best distance
between checkpoints is sqrt(2 * cost / rate of failures), cost in units of the work that
one token is (J. W. Young, A first order approximation to the optimum checkpoint
interval, CACM 17(9), 1974). All of it is measured while serving. Where rows are free,
as on a GPU with few requests, every boundary is judged.
"""

from __future__ import annotations

import math

# No verdict answers for more segments than this unless a setting says so.
MAX_EVERY = 3
# Passes before their cost a row is known.
MIN_PASSES = 8
# Weight of a new pass, once there are many.
SMOOTHING = 0.03
# What a round's verdicts still count for after the next one.
MEMORY = 0.98
# Failures and judged tokens before the first verdict: about what a draft gives that is
# wrong every fifth segment.
PRIOR = (1.0, 64.0)
# A pass that took more than this many times what its rows explain was held up.
HELD_UP = 2.0


class JudgeSpacing:
    """Learns what rows, draft tokens and failing verdicts cost; all averages."""

    def __init__(self) -> None:
        self._num_passes = 0
        self._rows = self._ms = 0.0  # means, and below their (co)variances
        self._var_rows = self._cov = 0.0
        self._draft_ms = self._drafted = 0.0
        self._failures, self._tokens = PRIOR

    def observe_pass(self, num_rows: int, pass_ms: float) -> None:
        """A verify pass of num_rows rows took pass_ms milliseconds."""
        self._num_passes += 1
        weight = max(SMOOTHING, 1 / self._num_passes)
        if self._num_passes > MIN_PASSES:
            expected = self._ms + (self.row_ms or 0.0) * (num_rows - self._rows)
            pass_ms = min(pass_ms, HELD_UP * max(expected, self._ms))
        rows, ms = num_rows - self._rows, pass_ms - self._ms
        self._rows += weight * rows
        self._ms += weight * ms
        self._var_rows = (1 - weight) * (self._var_rows + weight * rows * rows)
        self._cov = (1 - weight) * (self._cov + weight * rows * ms)

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
    def row_ms(self) -> float | None:
        """Milliseconds that one more row adds to a pass; None while unknown."""
        if self._num_passes < MIN_PASSES or not self._var_rows:
            return None
        return max(0.0, self._cov / self._var_rows)

    def every(self, *, suffix_len: int, segment_len: float) -> int:
        """Judge at every so-manieth boundary, 1 to MAX_EVERY.

        suffix_len: tokens of a judge suffix. segment_len: mean tokens of a segment.
        """
        row_ms = self.row_ms
        if not row_ms or not segment_len:
            return 1
        suffix_ms = suffix_len * row_ms
        # A token that is lost is drafted, forwarded and judged once more.
        token_ms = row_ms + suffix_ms / segment_len
        token_ms += self._draft_ms / self._drafted if self._drafted else 0.0
        rate = self._failures / self._tokens
        if not rate:
            return MAX_EVERY
        tokens = math.sqrt(2 * suffix_ms / (rate * token_ms))
        return min(max(1, round(tokens / segment_len)), MAX_EVERY)
