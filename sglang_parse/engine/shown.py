"""What the target is shown: drafts that await their pass, then the rows of a pass."""

from __future__ import annotations

from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.verify.layout import PassRequest, VerifyPlan, build_verify_plan


def resume_draft(r: RequestRound) -> None:
    """Go on with the draft of the rounds before, as far as the window and a grammar
    allow it."""
    held = r.state.draft
    num = min(len(held.tokens), r.window)
    if r.grammar is not None and num:
        num = r.grammar.walk(held.tokens[:num])
    r.draft = held.first(num)


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
