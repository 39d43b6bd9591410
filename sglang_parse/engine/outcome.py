"""What becomes of the drafts: scores, cuts, and the target followed from each cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

from torch import Tensor

from sglang_parse.engine.failures import guard
from sglang_parse.engine.ports import Sampler, Target
from sglang_parse.judging.decide import (
    Cut,
    Decision,
    choose_cut,
    decide,
    exact_cut,
)
from sglang_parse.options.extensions import ExtensionError
from sglang_parse.policy.planner import pays
from sglang_parse.reporting.report import RoundRecord
from sglang_parse.requests.ends import TextEnds
from sglang_parse.requests.round_records import Kept, RequestRound, Round, Verdict

# Rows of the target's logits asked for in one call, over all requests; and the least
# and most of one request.
WAVE_ROWS = 512
WAVE_WIDTH = (8, 32)
# Scores of verdict rows: (logits, what each row was asked) -> one per row.
ScoreRows = Callable[[Tensor, Sequence[Any]], list[float]]


def wave_width(num_requests: int) -> int:
    """Rows of each request whose logits are computed in one call."""
    least, most = WAVE_WIDTH
    return min(max(least, WAVE_ROWS // num_requests), most)


def suffix_scores(
    round: Round,
    logits: Tensor,
    judge: ScoreRows,
    on_error: Callable[[ExtensionError], None],
) -> list[tuple[float, ...]]:
    """The scores of each request's judge suffixes.

    logits: [number of suffixes, vocab] at least, request by request. They are read back
    once for the whole batch. Where the judge raises, on_error is told, and each score
    is NaN (`suffix_verdict`).
    """
    asked = [r.state.judge for r in round for _ in r.segments.suffix_boundaries]
    values: Iterator[float]
    try:
        values = iter(judge(logits[: len(asked)], asked) if asked else ())
    except ExtensionError as error:
        on_error(error)
        values = iter([math.nan] * len(asked))
    return [tuple(islice(values, len(r.segments.suffix_boundaries))) for r in round]


def suffix_verdict(scores: tuple[float, ...]) -> Verdict:
    """The verdict where every boundary has a judge suffix."""
    if any(map(math.isnan, scores)):
        return Verdict(has_failed=True)
    return Verdict(scores)


def choose_cut_of(r: RequestRound) -> Cut:
    """Where a draft is cut, by the request's mode, threshold and keep rule."""
    options, num_draft = r.state.options, len(r.verified)
    if options.mode != "semantic":
        return exact_cut(num_draft)
    return choose_cut(
        r.verdict.scores,
        r.boundaries,
        num_draft_tokens=num_draft,
        threshold=r.verdict.thresholds or options.threshold,
        keep_rule=options.keep_rule,
        exact_tail=options.exact_tail,
        exact_end=r.exact_end,
    )


def follow_target(round: Round, target: Sampler) -> None:
    """Cut each draft, sample the target at the rows that the cut needs, and fill `kept`
    of each request.

    The LM head runs over a few rows of each request at a time, and goes on only where
    the target has agreed with the draft so far: never over all rows of a pass.
    """
    cuts = [_guarded_cut(r) for r in round]
    chosen: list[list[int]] = [[] for _ in cuts]
    places: list[list[int]] = [[] for _ in cuts]
    samples = []
    going, num_sampled = list(range(len(cuts))), 0
    while going:
        width = wave_width(len(going))
        owner: list[int] = []
        offset: list[int] = []
        for i in going:
            done = len(chosen[i])
            wave = cuts[i].rows[done : done + width]
            owner += [i] * len(wave)
            offset += wave
        tokens, sampled = target.sample(round, owner, offset)
        samples.append(sampled)
        agreeing = dict.fromkeys(going, True)
        for i, j, token in zip(owner, offset, tokens, strict=True):
            chosen[i].append(token)
            places[i].append(num_sampled)
            num_sampled += 1
            agreeing[i] &= round.requests[i].draft.tokens[j : j + 1] == (token,)
        going = [i for i in going if len(chosen[i]) < len(cuts[i].rows) and agreeing[i]]
    round.sampled = target.join_samples(samples)
    for r, cut, tokens, rows in zip(round, cuts, chosen, places, strict=True):
        guard(r, partial(_keep, cut=cut, chosen=tokens, places=tuple(rows)))


def _guarded_cut(r: RequestRound) -> Cut:
    """The cut, and one that keeps nothing for a request that fails."""
    cuts: list[Cut] = []
    guard(r, lambda r: cuts.append(choose_cut_of(r)))
    return cuts[0] if cuts else Kept().cut


def _keep(
    r: RequestRound, *, cut: Cut, chosen: Sequence[int], places: tuple[int, ...]
) -> None:
    if r.verified:
        r.kept = Kept(cut, decide(cut, r.verified, chosen), places)
    else:
        r.kept = Kept(cut, Decision(tuple(chosen), 0, 0, ()), places)


def decode(
    round: Round, target: Target, is_due: Callable[[], bool] = lambda: False
) -> None:
    """The target's ordinary decode steps; fill `kept` of each request, and the number
    of steps taken.

    is_due: whether the scheduler has to be asked now.

    What it wrote behind an end counts for nothing.
    """
    lens = [r.tokens_left for r in round]
    ends = TextEnds(lens, [r.state.stop_ids for r in round])

    def go_on(steps: list[list[int]], num: int) -> bool:
        ends.see(steps)
        return pays(ends.lens, num + 1) and not is_due()

    steps = target.decode(round, go_on)
    round.num_steps = len(steps)
    ends.see(steps)
    for row, r in enumerate(round):
        num = min(ends.lens[row], len(steps))
        chosen = tuple(step[row] for step in steps[:num])
        places = tuple(k * len(round) + row for k in range(num))
        r.root_row = row
        r.kept = Kept(decision=Decision(chosen, 0, 0, ()), places=places)


def record(r: RequestRound, reason: str = "") -> None:
    """Tell the request's report of the round. reason: why it was not judged."""
    tokens = r.decision.accept_tokens
    if r.draft.tokens or r.draft.parts or not tokens:
        r.state.report.record(record_of(r, reason))
        return
    told = reason if r.state.options.mode == "semantic" else ""
    for k in range(len(tokens)):
        r.state.report.record_plain(r.output_len + k, told)


def record_of(r: RequestRound, reason: str = "") -> RoundRecord:
    """The round as the request's report counts it. reason: why it was not judged."""
    return RoundRecord(
        output_len=r.output_len,
        accept_tokens=r.decision.accept_tokens,
        draft_tokens=r.verified,
        num_client=min(r.draft.num_client, len(r.verified)),
        boundaries=r.boundaries,
        scores=r.verdict.scores,
        drafted_by=r.draft.parts,
        written_by=r.draft.written_by,
        exact_end=r.exact_end,
        num_judged=r.decision.num_judged,
        num_matched=r.decision.num_matched,
        judged_by=r.verdict.judged_by,
        num_passes=r.verdict.num_passes,
        not_judged=reason if reason and r.state.options.mode == "semantic" else "",
    )
