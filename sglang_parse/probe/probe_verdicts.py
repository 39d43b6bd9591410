"""The verdict source that reads a probe, and asks the target where that is in doubt.

The row of the last token of a prefix is in the pass anyway. The probe reads it there,
so that a verdict takes no row. Three cases still ask the target: the guard's share of
boundaries, all boundaries while the guard holds the probe for wrong, and, with `auto`,
boundaries where the probe is in doubt. The last are asked in one more pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from sglang_parse.engine.outcome import ScoreRows, suffix_scores, suffix_verdict
from sglang_parse.engine.ports import RankAgreement, Slots, Target
from sglang_parse.engine.verdict_source import Scores
from sglang_parse.options.extensions import ExtensionError
from sglang_parse.probe.linear_probe import Point, Probe
from sglang_parse.probe.pair_collector import PairCollector
from sglang_parse.probe.probe_guard import ProbeGuard
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.round_records import RequestRound, Round, Segments, Verdict
from sglang_parse.verify.layout import PassRequest, build_verify_plan

logger = logging.getLogger(__name__)

# Weight of a round in the share of boundaries in doubt.
SMOOTHING = 0.02
# The planner's choices are kept while the rows of a verdict stay within such a step.
ROWS_STEP = 0.5


@dataclass(frozen=True)
class RoundParts:
    """What one more pass of a round needs.

    view: (SGLang's batch, indices) -> the batch of these requests alone. judge: scores
    verdict rows. on_error: told what it raises.
    """

    target: Target
    slots: Slots
    ranks: RankAgreement
    view: Callable[[Any, Sequence[int]], Any]
    judge: ScoreRows
    on_error: Callable[[ExtensionError], None]


class ProbeVerdicts:
    """`VerdictSource`: chooses who judges each boundary, and merges the verdicts.

    probe: None where the server only collects pairs. guard: None where nothing compares
    the probe. collector: None where no pairs are kept; question: whose verdicts it
    keeps.
    """

    def __init__(
        self,
        parts: RoundParts,
        probe: Probe | None,
        guard: ProbeGuard | None = None,
        collector: PairCollector | None = None,
        question: str = "",
    ) -> None:
        self.parts = parts
        self.probe = probe
        self.guard = guard
        self.collector = collector
        self.question = question
        #: Share of the boundaries of `auto` that were in doubt lately.
        self.doubt_share = 0.0

    # -- Before the pass -------------------------------------------------------

    def open(self, round: Round) -> None:
        if self.guard is not None and not self.guard.holds:
            return
        share = self.guard.current_share if self.guard is not None else 0.0
        for r in round:
            if r.state.judge_kind != "suffix":
                doubt = self.doubt_share if r.state.judge_kind == "auto" else 0.0
                rows = min(1.0, share + doubt) * len(r.state.suffix)
                # Rounded up, so that the planner's choices hold for a while.
                r.rows_per_verdict = -(-rows // ROWS_STEP) * ROWS_STEP

    def choose(self, round: Round, *, room: int) -> None:
        for r in round:
            if r.rows_per_verdict is None:
                room -= len(r.segments.boundaries) * len(r.state.suffix)
        for r in round:
            found = r.segments.boundaries
            if r.rows_per_verdict is None or not found:
                continue
            drawn = [b for b in found if self.guard and self.guard.draw()]
            drawn = drawn[: max(0, room // len(r.state.suffix))]
            room -= len(drawn) * len(r.state.suffix)
            left = frozenset(found).difference(drawn)
            r.segments = replace(r.segments, without_suffix=left)

    # -- After the pass --------------------------------------------------------

    def read(self, round: Round) -> list[Scores]:
        """The scores of each request's suffixes, then those that the probe reads."""
        parts, logits = self.parts, round.output.logits
        scores = suffix_scores(round, logits, parts.judge, parts.on_error)
        return [*scores, *self._read_probe(round)]

    def _read_probe(self, round: Round) -> list[Scores]:
        """One product for all boundaries of the batch."""
        nums = [
            len(r.boundaries) if self.probe and r.state.judge_kind != "suffix" else 0
            for r in round
        ]
        pairs = zip(round, nums, strict=True)
        rows = [r.root_row + b for r, num in pairs for b in r.boundaries[:num]]
        if self.probe is None or not rows:
            return [()] * len(round)
        values = iter(self.probe.scores(round.output.states_at(rows)).tolist())
        return [tuple(islice(values, num)) for num in nums]

    def settle(self, round: Round, read: Sequence[Scores]) -> None:
        doubts: list[tuple[int, Scores]] = []
        suffixes, probed = read[: len(round)], read[len(round) :]
        for i, (r, scores, own) in enumerate(zip(round, suffixes, probed, strict=True)):
            r.verdict = suffix_verdict(scores)
            if r.verdict.has_failed:
                continue
            asked = dict(zip(r.segments.suffix_boundaries, scores, strict=True))
            self._collect(round, r)
            if not own or not r.boundaries:
                continue
            self._compare(r, asked, own)
            if r.rows_per_verdict is None:
                continue
            self._merge(r, asked, own)
            if r.state.judge_kind == "auto":
                doubts.append((i, own))
        self._ask(round, doubts)

    def _collect(self, round: Round, r: RequestRound) -> None:
        """Keep the target's verdicts on drafts; a client's text is none."""
        options, asked = r.state.options, r.segments.suffix_boundaries
        usual = options.judge_suffix == self.question
        if self.collector is None or not (usual and asked) or r.state.client:
            return
        states = round.output.states_at([r.root_row + b for b in asked])
        self.collector.add(
            r.state,
            states,
            r.verdict.scores,
            segmenter=options.segmenter,
            rid=r.req.rid,
        )

    def _compare(
        self, r: RequestRound, asked: Mapping[int, float], own: Scores
    ) -> None:
        """Tell the guard of boundaries that both have judged."""
        if self.guard is None:
            return
        threshold, point = r.state.options.threshold, self._point(r)
        for b, found in zip(r.boundaries, own, strict=True):
            in_doubt = r.state.judge_kind == "auto" and not point.is_sure(found)
            if b not in asked or in_doubt:
                continue
            agrees = (asked[b] >= threshold) == (found >= point.cutoff)
            if told := self.guard.compare(agrees=agrees):
                logger.warning("PARSE: %s.", told)

    def _point(self, r: RequestRound) -> Point:
        assert self.probe is not None
        return self.probe.points[r.state.options.segmenter]

    def _merge(
        self,
        r: RequestRound,
        asked: Mapping[int, float],
        own: Scores,
        num_passes: int = 1,
    ) -> None:
        """The target's scores where it was asked, the probe's elsewhere."""
        pairs = list(zip(r.boundaries, own, strict=True))
        cutoff, threshold = self._point(r).cutoff, r.state.options.threshold
        r.verdict = Verdict(
            scores=tuple(asked.get(b, found) for b, found in pairs),
            thresholds=tuple(threshold if b in asked else cutoff for b, _ in pairs),
            judged_by=tuple("suffix" if b in asked else "probe" for b, _ in pairs),
            num_passes=num_passes,
        )

    # -- Doubt -----------------------------------------------------------------

    def _ask(self, round: Round, requests: Sequence[tuple[int, Scores]]) -> None:
        """One more pass for the boundaries in doubt, as far as there is room.

        Without room the probe's cutoff decides.
        """
        slots = self.parts.slots
        room = min(slots.num_free(round.batch.tree_cache), slots.max_rows)
        chosen = []
        for i, own in requests:
            r = round.requests[i]
            doubts = doubtful(r, self._point(r))
            share = len(doubts) / len(r.boundaries)
            self.doubt_share += SMOOTHING * (share - self.doubt_share)
            if not doubts:
                continue
            one = doubt_request(r, doubts)
            num = 1 + len(one.draft_tokens) + len(doubts) * len(one.suffix)
            if num <= room:
                room -= num
                chosen.append((i, own, doubts, one))
        if chosen:
            ones = [one for *_, one in chosen]
            found = self._verify(round, [i for i, *_ in chosen], ones)
            for (i, own, doubts, _), scores in zip(chosen, found, strict=True):
                r = round.requests[i]
                asked = dict(zip(r.boundaries, r.verdict.scores, strict=True))
                asked = {b: asked[b] for b in r.segments.suffix_boundaries}
                asked |= dict(zip(doubts, scores, strict=True))
                self._merge(r, asked, own, num_passes=2)

    def _verify(
        self, round: Round, indices: Sequence[int], ones: Sequence[PassRequest]
    ) -> list[tuple[Any, ...]]:
        """The target's scores in a pass over some requests of the round."""
        parts = self.parts
        records = [
            _asking(round.requests[i], one)
            for i, one in zip(indices, ones, strict=True)
        ]
        part = Round(parts.view(round.batch, indices), records)
        plan = build_verify_plan(ones)
        round.output = round.output.kept()
        output = parts.target.verify(part, plan)
        round.num_rows += plan.num_verify_tokens
        scores = suffix_scores(part, output.logits, parts.judge, parts.on_error)
        return parts.ranks.agree_all(scores)


def doubtful(r: RequestRound, point: Point) -> tuple[int, ...]:
    """Boundaries where the probe is in doubt and the answer may change the cut.

    After a prefix that surely fails nothing can be kept, unless the longest valid
    prefix is.
    """
    found = []
    verdict = r.verdict
    pairs = zip(r.boundaries, verdict.scores, verdict.thresholds, strict=True)
    for b, value, least in pairs:
        if b in r.segments.without_suffix and not point.is_sure(value):
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
        segments=Segments(one.boundaries),
        verdict=Verdict(),
    )
