"""How many tokens the target writes in a round in which nobody drafts; pure.

Between two rounds the scheduler plans, and a round begins and ends. Where a decode step
is short, that takes a good part of the time. Several steps in a row share it.
"""

from __future__ import annotations

from sglang_parse.requests.round import Round

# Most steps of a round, and their milliseconds together: so long a new request waits,
# and so long a stream gets no token.
MOST_STEPS, MOST_MS = 4, 40.0


def plain_steps(round: Round, *, step_ms: float, context_len: int) -> int:
    """Decode steps of a round without drafts. step_ms: of one, 0 while unknown."""
    if not (round.may_repeat and step_ms) or round.num_waiting:
        return 1
    left = min(
        min(
            r.req.sampling_params.max_new_tokens - r.output_len,
            context_len - r.seq_len - 1,
        )
        for r in round
    )
    return max(1, min(MOST_STEPS, int(MOST_MS / step_ms), left))
