"""What becomes of the drafts: scores, cuts, and the target followed from each cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
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
from sglang_parse.policy.plain_steps import pays
from sglang_parse.reporting.report import RoundRecord
from sglang_parse.requests.ends import TextEnds
from sglang_parse.requests.round import RequestRound, Round

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


def largest_wave(num_requests: int) -> int:
    """Rows of the target's logits at a time, of up to so many requests."""
    return max(WAVE_ROWS, num_requests * wave_width(num_requests))


def score(
    round: Round,
    logits: Tensor,
    judge: ScoreRows,
    on_error: Callable[[ExtensionError], None],
) -> None:
    """Fill `scores` of each request from the verdict rows of the pass.

    logits: [number of suffixes, vocab] at least, request by request. They are read back
    once for the whole batch. Where the judge fails, each score is NaN (see
    `drop_failed_verdicts`), and on_error is told.
    """
    asked = [r.state.judge for r in round for _ in r.suffix_boundaries]
    values: Iterator[float]
    try:
        values = iter(judge(logits[: len(asked)], asked) if asked else ())
    except ExtensionError as error:
        on_error(error)
        values = iter([math.nan] * len(asked))
    for r in round:
        r.scores = tuple(islice(values, len(r.suffix_boundaries)))


def drop_failed_verdicts(r: RequestRound) -> None:
    """Where the judge failed, follow the target along what it was shown of the draft.

    The rest of the draft, which has no rows in the pass, is lost.
    """
    if any(map(math.isnan, r.scores)):
        tokens = r.shown
        r.draft = replace(
            r.draft,
            tokens=tokens,
            ended=r.draft.ended and len(tokens) == len(r.draft.tokens),
            num_client=min(r.draft.num_client, len(tokens)),
        )
        r.boundaries = r.scores = r.thresholds = ()
        r.num_segments = r.num_segment_tokens = 0
        r.exact_end = len(tokens)


def choose_cuts(round: Round) -> None:
    """Fill `cut` of each request, by its own mode, threshold and keep rule."""
    for r in round:
        guard(r, _choose_cut)


def _choose_cut(r: RequestRound) -> None:
    r.cut = cut_of(r)


def cut_of(r: RequestRound) -> Cut:
    """Where a request's draft is cut by the scores that it has."""
    options, num_draft = r.state.options, len(r.draft.tokens)
    if options.mode != "semantic":
        return exact_cut(num_draft)
    return choose_cut(
        r.scores,
        r.boundaries,
        num_draft_tokens=num_draft,
        threshold=r.thresholds or options.threshold,
        keep_rule=options.keep_rule,
        exact_tail=options.exact_tail,
        exact_end=r.exact_end,
    )


def follow_target(round: Round, target: Sampler) -> None:
    """Sample the target at the rows the cuts ask for; fill `decision` of each request.

    The LM head runs over a few rows of each request at a time, and on only where the
    target has agreed with the draft so far: never over all rows of a pass.
    """
    requests = round.requests
    asked = [r.cut.rows for r in requests]
    for r in requests:
        r.chosen, r.places = [], []
    samples = []
    going = list(range(len(requests)))
    num_sampled = 0
    while going:
        width = wave_width(len(going))
        owner: list[int] = []
        offset: list[int] = []
        for i in going:
            done = len(requests[i].chosen)
            wave = asked[i][done : done + width]
            owner += [i] * len(wave)
            offset += wave
        tokens, sampled = target.sample(round, owner, offset)
        samples.append(sampled)
        agreeing = dict.fromkeys(going, True)
        for i, j, token in zip(owner, offset, tokens, strict=True):
            r = requests[i]
            r.chosen.append(token)
            r.places.append(num_sampled)
            num_sampled += 1
            agreeing[i] &= r.draft.tokens[j : j + 1] == (token,)
        going = [
            i for i in going if len(requests[i].chosen) < len(asked[i]) and agreeing[i]
        ]
    round.sampled = target.join_samples(samples)
    for r in requests:
        guard(r, _decide)


def decode(
    round: Round, target: Target, is_due: Callable[[], bool] = lambda: False
) -> None:
    """The target's ordinary decode steps; fill `decision` of each request, and the
    number of steps taken.

    is_due: whether the scheduler has to be asked now; asked between steps.

    What it wrote behind an end counts for nothing. Where a recurrent state has read it,
    it belongs to the answer until SGLang cuts it, which caches the state with it.
    """
    lens = [r.num_skipped + r.tokens_left for r in round]
    ends = TextEnds(lens, [r.state.stop_ids for r in round])

    def go_on(steps: list[list[int]], num: int) -> bool:
        ends.see(steps)
        if num == round.num_steps:
            # One more would be the next round's: it has to be everybody's.
            return min(ends.lens) > num
        return pays(ends.lens, num + 1) and not (round.looks_up and is_due())

    steps = target.decode(round, go_on)
    round.goes_on = round.goes_on and len(steps) == round.num_steps
    round.num_steps = len(steps)
    ends.see(steps)
    for row, r in enumerate(round):
        r.root_row, r.cut = row, Cut(0, 0, reuse_tail=False)
        num = len(steps) if round.has_state else min(ends.lens[row], len(steps))
        r.chosen = [step[row] for step in steps[r.num_skipped : num]]
        r.places = [k * len(round) + row for k in range(r.num_skipped, num)]
        r.decision = Decision(tuple(r.chosen), 0, 0, ())


def _decide(r: RequestRound) -> None:
    if not r.draft.tokens:
        r.decision = Decision(tuple(r.chosen), 0, 0, ())
        return
    r.decision = decide(r.cut, r.draft.tokens, r.chosen)


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
        draft_tokens=r.draft.tokens,
        num_client=r.draft.num_client,
        boundaries=r.boundaries,
        scores=r.scores,
        drafted_by=r.draft.parts,
        written_by=r.draft.written_by,
        exact_end=r.exact_end,
        num_judged=r.decision.num_judged,
        num_matched=r.decision.num_matched,
        judged_by=r.judged_by,
        num_passes=r.num_passes,
        not_judged=reason if reason and r.state.options.mode == "semantic" else "",
    )
