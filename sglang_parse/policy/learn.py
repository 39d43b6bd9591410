"""What a finished round teaches: how long its drafts lasted, and what it cost; pure."""

from __future__ import annotations

import math
from collections.abc import Sequence

from sglang_parse.policy.chains import Confidence
from sglang_parse.policy.goodput import Drafts
from sglang_parse.policy.round_costs import CostModel
from sglang_parse.policy.survival import Survival
from sglang_parse.requests.round import RequestRound, Round


def learn_drafts(drafts: Drafts, r: RequestRound, *, judged: bool) -> None:
    """How long this request's draft lasted, before its state moves on."""
    if not r.draft.tokens or r.error is not None:
        return
    if r.draft.num_new:
        drafts.ends.count(r.draft.num_new, int(r.draft.ended))
    if r.cut.exact_end:
        recovering = bool(r.state.recovering) and judged
        _learn_agreement(drafts, r, recovering=recovering)
    if not judged or r.state.options.mode != "semantic":
        if not r.cut.exact_end:
            _learn_agreement(drafts, r, recovering=False)
        return
    _learn_segments(drafts.segments, r)
    if not r.boundaries:
        # No verdict: the target was followed.
        if not r.cut.exact_end:
            _learn_agreement(drafts, r, recovering=False)
        return
    if r.rejected_end:
        # Of a segment that failed with others already, one failure is enough.
        first = r.rejected_end > r.state.num_suspect
        num_right = error_at(drafts.valid.rate, r.rejected_end - r.cut.num_kept)
        num_right += r.cut.num_kept - r.exact_end
        drafts.valid.observe(max(0, round(num_right) - 1), ended=first)
        num = r.decision.num_matched
        whole = r.cut.num_kept + num >= r.cut.tail_end
        if r.cut.tail_end > r.cut.num_kept:
            drafts.recovering.observe(num, ended=not whole)
    elif r.decision.num_judged > r.exact_end:
        drafts.valid.observe(r.decision.num_judged - r.exact_end, ended=False)
        if not r.draft.ended and len(r.draft.tokens) > r.cut.num_kept:
            drafts.lost.count(1, int(not r.decision.pending))


# Errors in a failing part from which on its length says nothing of the first one.
MANY = 50.0


def error_at(rate: float, length: int) -> float:
    """Where in a failing part of so many tokens the first error is on average: in its
    middle, and the nearer to its beginning, the more errors there are a token."""
    if rate * length < 1e-3:
        return length / 2
    if rate * length > MANY:
        return 1 / rate
    return 1 / rate - length / math.expm1(rate * length)


def _learn_agreement(drafts: Drafts, r: RequestRound, *, recovering: bool) -> None:
    """Where the target was followed from the draft's beginning."""
    end = r.cut.exact_end or r.cut.tail_end
    num = min(r.decision.num_correct_drafts, end)
    if not end or r.draft.num_copied:
        return  # the drafter that copies tells itself what became of it
    if r.draft.num_token_level:
        own = drafts.token_level
        end, num = min(end, r.draft.num_token_level), min(num, r.draft.num_token_level)
    else:
        own = drafts.recovering if recovering else drafts.followed
    own.observe(num, ended=num < end)


def learn_confidence(confidence: Confidence, r: RequestRound) -> None:
    """How often tokens stand, by what their drafter thought of them."""
    end = r.cut.exact_end or r.cut.tail_end
    num = r.decision.num_correct_drafts
    for k, chance in enumerate(r.chances[: min(end, num + 1)]):
        confidence.observe(chance, right=k < num)


def _learn_segments(segments: Survival, r: RequestRound) -> None:
    """How many segments ended in what was drafted behind the target's own part."""
    # What was pending has been looked at before, and held no end.
    num_tokens = min(len(r.draft.tokens) - r.exact_end, r.draft.num_new)
    segments.count(num_tokens, r.num_segments)


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


def learn_costs(
    costs: CostModel,
    round_: Round,
    *,
    elsewhere: Sequence[str] = (),
    token_level: Sequence[str] = (),
    follows: bool = True,
) -> float:
    """Milliseconds of the round and of the scheduler before it. What they tell of
    rounds to come is learnt.

    elsewhere: drafters that work on another machine. token_level: those of single
    tokens. follows: whether the round before it was plain and meant to go on.
    """
    seconds, bs = round_.seconds, len(round_)
    own = costs.at(bs)
    if round_.between:
        own.between.add(bs, 1000 * round_.between, tells_speed=False)
    between_ms = 1000 * round_.between or own.between.ms
    ms = 1000 * sum(seconds.values()) + between_ms
    if not round_.judged and any(r.budgets.keys() & token_level for r in round_):
        tokens = sum(len(r.decision.accept_tokens) for r in round_)
        own.asked.add(tokens, ms, tells_speed=False)
    if "plain" in seconds:
        steps_ms, num = 1000 * seconds["plain"], round_.num_steps
        own.add_plain(
            bs,
            steps_ms,
            ms - steps_ms,
            num,
            hides=round_.took_ahead,
            is_first=not (follows or round_.took_ahead),
        )
        return ms
    own.verify.add(round_.num_rows, ms - 1000 * seconds["draft"])
    steps = max(r.draft.num_segment_level for r in round_)
    token_steps = max(r.draft.num_token_level - r.draft.num_copied for r in round_)
    if steps and all(
        r.draft.num_segment_level == sum(map(r.draft.num_by, elsewhere)) for r in round_
    ):
        # This machine only read what had come.
        own.draft.add(steps, 1000 * seconds["draft"], tells_speed=False)
    elif steps and not token_steps:
        own.add_draft(steps, round_.num_read, 1000 * seconds["draft"])
    elif token_steps and not steps:
        own.token_draft.add(token_steps, 1000 * seconds["draft"])
    return ms
