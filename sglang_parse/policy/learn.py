"""What a round has cost; pure."""

from __future__ import annotations

from sglang_parse.policy.costs import CostModel
from sglang_parse.requests.round_records import Round


def learn_costs(costs: CostModel, done: Round) -> float:
    """Milliseconds of a round. done: of the requests whose drafts were complete."""
    own, seconds = costs.at(done.num_running), done.seconds
    ms, draft_ms = 1000 * sum(seconds.values()), 1000 * seconds["draft"]
    if "plain" in seconds:
        if not (done.num_draft_steps or done.num_read):
            own.plain.add(ms / done.num_steps)
        return ms
    if "verify" in seconds:
        own.verify.add(done.num_rows, ms - draft_ms)
    by_head = any(r.draft.num_token_level > r.draft.num_copied for r in done)
    if done.num_draft_steps and not by_head:
        own.draft.add(done.num_draft_steps, draft_ms, done.num_read)
    return ms
