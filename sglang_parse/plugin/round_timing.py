"""A finished round as a line of the debug log, which `benchmarks/simulate` reads."""

from __future__ import annotations

from sglang_parse.requests.round_records import Round


def round_timing(done: Round) -> dict[str, float]:
    """done: the round of the requests whose drafts were complete; times in
    milliseconds."""
    return {
        "bs": done.num_running,
        "in_pass": len(done),
        "judged": int(done.judged),
        "steps": done.num_draft_steps,
        "token_steps": max((r.draft.num_token_level for r in done), default=0),
        "rows": done.num_rows,
        "read": done.num_read,
        "plain_steps": done.num_steps if "plain" in done.seconds else 0,
        "tokens": sum(len(r.decision.accept_tokens) for r in done),
        **{f"{name}_ms": 1000 * s for name, s in done.seconds.items()},
    }
