"""What a finished round cost; pure."""

from __future__ import annotations

from sglang_parse.policy.costs import CostModel
from sglang_parse.requests.round_records import Round


def round_timing(round_: Round) -> dict[str, float]:
    """A finished round as a line of the debug log (benchmarks/simulate/measure.py)."""
    return {
        "bs": len(round_),
        "judged": int(round_.judged),
        "steps": max(r.draft.num_segment_level for r in round_),
        "token_steps": max(r.draft.num_token_level for r in round_),
        "rows": round_.num_rows,
        "read": round_.num_read,
        "plain_steps": round_.num_steps if "plain" in round_.seconds else 0,
        "tokens": sum(len(r.decision.accept_tokens) for r in round_),
        "between_ms": 1000 * round_.between,
        **{f"{name}_ms": 1000 * s for name, s in round_.seconds.items()},
    }


def learn_costs(costs: CostModel, round_: Round, *, follows: bool) -> float:
    """Milliseconds of the round and of the scheduler before it.

    follows: whether the round before it was plain and meant to go on.
    """
    own, seconds = costs.at(len(round_)), round_.seconds
    if round_.between:
        own.between.add(1000 * round_.between)
    ms = 1000 * sum(seconds.values()) + (1000 * round_.between or own.between.ms)
    if "plain" in seconds:
        steps_ms = 1000 * seconds["plain"]
        own.add_plain(
            steps_ms,
            ms - steps_ms,
            round_.num_steps,
            hid=round_.took_ahead,
            follows=follows,
        )
        return ms
    draft_ms = 1000 * seconds["draft"]
    own.verify.add(round_.num_rows, ms - draft_ms)
    steps = max(r.draft.num_segment_level for r in round_)
    by_head = any(r.draft.num_token_level > r.draft.num_copied for r in round_)
    if steps and not by_head:
        own.draft.add(steps, draft_ms, round_.num_read)
    return ms
