"""What the target is shown: what is pending of each draft, then the rows of a pass."""

from __future__ import annotations

from sglang_parse.reporting.drafters import first_tokens
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.verify.layout import PassRequest, VerifyPlan, build_verify_plan

EMPTY = Draft()


def pending_draft(r: RequestRound) -> None:
    """What is to be judged without anybody drafting, as far as a grammar allows it."""
    state = r.state
    if not state.pending:
        r.draft = EMPTY
        return
    tokens = state.pending[: r.window]
    if r.grammar is not None:
        tokens = tokens[: r.grammar.walk(tokens)]
    ended = state.pending_ended and len(tokens) == len(state.pending)
    num_client = min(len(tokens), state.num_client)
    held = tuple(first_tokens(state.pending_by, len(tokens) - num_client))
    r.draft = Draft(tokens, ended, num_client=num_client, held=held)


def lay_out(round: Round) -> VerifyPlan:
    """The rows of the pass; `root_row` of each request."""
    plan = build_verify_plan(
        [
            PassRequest(
                seq_len=r.seq_len,
                bonus_token=r.bonus_token,
                draft_tokens=r.shown,
                boundaries=r.segments.suffix_boundaries,
                suffix=r.state.suffix,
            )
            for r in round
        ]
    )
    for r, row in zip(round, plan.root_rows, strict=True):
        r.root_row = row
    return plan
