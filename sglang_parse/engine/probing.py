"""Verdicts from hidden states: where the target is asked, and where a probe is read.

The row of the last token of a prefix stands in the pass anyway. A probe reads it there,
so that a verdict takes no row. Three cases still ask the target: the guard's share of
boundaries, all boundaries while the guard holds the probe for wrong, and, with `auto`,
boundaries where the probe is in doubt. These are asked in one more pass of the round.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import Any, Protocol

from torch import Tensor

from sglang_parse.engine.outcome import ScoreRows, score
from sglang_parse.engine.ports import Ranks, Slots, Target
from sglang_parse.judging.probe import Point, Probe
from sglang_parse.judging.probe_guard import ProbeGuard
from sglang_parse.options.extensions import ExtensionError
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.round import RequestRound, Round
from sglang_parse.target.layout import PassRequest, VerifyPlan, build_verify_plan

logger = logging.getLogger(__name__)

# Weight of a round in the share of boundaries in doubt.
SMOOTHING = 0.02
# The planner's choices are kept while the rows of a verdict stay within such a step.
ROWS_STEP = 0.5


class Collector(Protocol):
    """Keeps pairs to learn from (`judging.probe_pairs.PairCollector`)."""

    def add(
        self,
        owner: object,
        states: Tensor,
        scores: Sequence[float],
        *,
        segmenter: str,
        rid: str,
    ) -> None:
        """states: [n, width] at boundaries of one request, scores: the target's."""


class Probing:
    """Chooses who judges each boundary of a round, and merges the verdicts.

    view: (SGLang's batch, indices) -> the batch of these requests alone. guard: None
    where nobody compares. collector: None where no pairs are kept; question: the one
    whose verdicts it keeps.
    """

    def __init__(
        self,
        probe: Probe | None,
        *,
        target: Target,
        slots: Slots,
        ranks: Ranks,
        view: Callable[[Any, Sequence[int]], Any],
        judge: ScoreRows,
        guard: ProbeGuard | None = None,
        collector: Collector | None = None,
        question: str = "",
        on_error: Callable[[ExtensionError], None] = lambda error: None,
    ) -> None:
        self.probe = probe
        self.target = target
        self.slots = slots
        self.ranks = ranks
        self.view = view
        self.judge = judge
        self.guard = guard
        self.collector = collector
        self.question = question
        self.on_error = on_error
        #: Share of the boundaries of `auto` that were in doubt lately.
        self.doubt_share = 0.0

    # -- Before the pass -------------------------------------------------------

    def open(self, round: Round) -> None:
        """Fill `judge_kind` and `rows_per_verdict` of each request."""
        holds = self.guard is None or self.guard.holds
        share = self.guard.current_share if self.guard is not None else 0.0
        for r in round:
            r.judge_kind = r.state.judge_kind if holds else "suffix"
            if r.judge_kind == "suffix":
                continue
            doubt = self.doubt_share if r.judge_kind == "auto" else 0.0
            rows = min(1.0, share + doubt) * len(r.state.suffix)
            r.rows_per_verdict = round_up(rows)

    def choose(self, round: Round, *, room: int) -> None:
        """Fill `unasked` of each request. room: rows that suffixes may take."""
        for r in round:
            if r.judge_kind == "suffix":
                room -= len(r.boundaries) * len(r.state.suffix)
        for r in round:
            if r.judge_kind == "suffix" or not r.boundaries:
                continue
            drawn = [b for b in r.boundaries if self.guard and self.guard.draw()]
            drawn = drawn[: max(0, room // len(r.state.suffix))]
            room -= len(drawn) * len(r.state.suffix)
            r.unasked = frozenset(r.boundaries).difference(drawn)

    # -- Behind the pass -------------------------------------------------------

    def read(self, round: Round) -> None:
        """Fill `probe_scores`: one product for all boundaries of the batch."""
        if self.probe is None:
            return
        read = [r for r in round if r.state.probe_fits and r.boundaries]
        rows = [r.root_row + b for r in read for b in r.boundaries]
        if not rows:
            return
        states = round.output.states_at(rows)
        values: Iterator[float] = iter(self.probe.scores(states).tolist())
        for r in read:
            r.probe_scores = tuple(islice(values, len(r.boundaries)))

    def settle(self, round: Round) -> None:
        """Merge the verdicts of the pass; ask where the probe is in doubt."""
        for r in round:
            self._collect(round, r)
            if r.probe_scores:
                self._compare(r)
        merged = [r for r in round if r.probe_scores and r.judge_kind != "suffix"]
        for r in merged:
            self._merge(r, dict(zip(r.asked, r.scores, strict=True)))
        self._ask(round, [r for r in merged if r.judge_kind == "auto"])

    def _collect(self, round: Round, r: RequestRound) -> None:
        """Keep what the target was asked of drafts; a client's text is none."""
        options = r.state.options
        usual = options.judge_suffix == self.question
        if self.collector is None or not (usual and r.asked) or r.state.client:
            return
        states = round.output.states_at([r.root_row + b for b in r.asked])
        self.collector.add(
            r.state, states, r.scores, segmenter=options.segmenter, rid=r.req.rid
        )

    def _compare(self, r: RequestRound) -> None:
        """Tell the guard of boundaries that both have judged, by the learnt cutoff:
        no request can make the probe look worse than it is."""
        if self.guard is None or self.probe is None:
            return
        options = r.state.options
        threshold, point = options.threshold, self.probe.points[options.segmenter]
        asked = dict(zip(r.asked, r.scores, strict=True))
        for b, found in zip(r.boundaries, r.probe_scores, strict=True):
            doubts = r.state.judge_kind == "auto" and not point.is_sure(found)
            if b not in asked or doubts or r.state.judge_kind == "suffix":
                continue
            agrees = (asked[b] >= threshold) == (found >= point.cutoff)
            if told := self.guard.compare(agrees=agrees):
                logger.warning("PARSE: %s.", told)

    def _point(self, r: RequestRound) -> Point:
        assert self.probe is not None
        options = r.state.options
        point = self.probe.points[options.segmenter]
        return point.adjusted(
            learnt_as_none(options.probe_cutoff), learnt_as_none(options.probe_band)
        )

    def _merge(self, r: RequestRound, asked: dict[int, float]) -> None:
        """The target's scores where it was asked, the probe's elsewhere."""
        pairs = list(zip(r.boundaries, r.probe_scores, strict=True))
        r.scores = tuple(asked.get(b, found) for b, found in pairs)
        cutoff, threshold = self._point(r).cutoff, r.state.options.threshold
        r.thresholds = tuple(threshold if b in asked else cutoff for b, _ in pairs)

    # -- Doubt -----------------------------------------------------------------

    def _ask(self, round: Round, requests: Sequence[RequestRound]) -> None:
        """One more pass for the boundaries in doubt, as far as there is room.

        Without room the probe's cutoff decides.
        """
        room = min(self.slots.num_free(round.batch.tree_cache), self.slots.max_rows)
        chosen = []
        asking = set(map(id, requests))
        for i, r in enumerate(round):
            if id(r) not in asking:
                continue
            doubts = doubtful(r, self._point(r))
            self._note_share(len(doubts), len(r.boundaries))
            if not doubts:
                continue
            one = doubt_request(r, doubts)
            num = 1 + len(one.draft_tokens) + len(doubts) * len(one.suffix)
            if num <= room:
                room -= num
                chosen.append((i, r, doubts, one))
        if not chosen:
            return
        part = Round(
            self.view(round.batch, [i for i, *_ in chosen]),
            [_asking(r, one) for _, r, _, one in chosen],
        )
        plan: VerifyPlan = build_verify_plan([one for *_, one in chosen])
        round.output = round.output.kept()
        output = self.target.verify(part, plan)
        round.num_rows += plan.num_verify_tokens
        score(part, output.logits, self.judge, self.on_error)
        agreed = self.ranks.agree_all([one.scores for one in part])
        for (_, r, doubts, _), scores in zip(chosen, agreed, strict=True):
            asked = dict(zip(r.asked, self._asked_scores(r), strict=True))
            r.doubted = frozenset(doubts)
            self._merge(r, asked | dict(zip(doubts, scores, strict=True)))

    def _asked_scores(self, r: RequestRound) -> list[float]:
        """The target's scores among the merged ones."""
        pairs = zip(r.boundaries, r.scores, strict=True)
        return [found for b, found in pairs if b not in r.unasked]

    def _note_share(self, num: int, total: int) -> None:
        if total:
            self.doubt_share += SMOOTHING * (num / total - self.doubt_share)


def doubtful(r: RequestRound, point: Point) -> tuple[int, ...]:
    """Boundaries where the probe is in doubt and the answer may change the cut.

    Behind a prefix that surely fails nothing can be kept, unless the longest valid
    prefix is.
    """
    found = []
    for b, value, least in zip(r.boundaries, r.scores, r.thresholds, strict=True):
        if b in r.unasked and not point.is_sure(value):
            found.append(b)
        elif value < least and r.state.options.keep_rule == "first-failure":
            break
    return tuple(found)


def doubt_request(r: RequestRound, doubts: tuple[int, ...]) -> PassRequest:
    """A pass that asks at some boundaries of a draft whose KV is written already.

    It begins a token before the first of them, and writes these tokens' KV again.
    """
    chain = (r.bonus_token, *r.draft.tokens)
    first = doubts[0] - 1
    return PassRequest(
        seq_len=r.seq_len + first,
        bonus_token=chain[first],
        draft_tokens=chain[first + 1 : doubts[-1] + 1],
        boundaries=tuple(b - first for b in doubts),
        suffix=r.state.suffix,
    )


def _asking(r: RequestRound, one: PassRequest) -> RequestRound:
    """A record of that pass; only its verdicts are read."""
    return replace(
        r,
        seq_len=one.seq_len,
        bonus_token=one.bonus_token,
        draft=Draft(tuple(one.draft_tokens)),
        boundaries=one.boundaries,
        unasked=frozenset(),
        scores=(),
        probe_scores=(),
        thresholds=(),
    )


def round_up(rows: float) -> float:
    """To the next step, so that the planner's choices hold for a while."""
    steps = -(-rows // ROWS_STEP)
    return float(steps * ROWS_STEP)


def learnt_as_none(value: float | str) -> float | None:
    """A setting of the probe; None for what its file says."""
    return None if isinstance(value, str) else value
