"""The verdict source that reads a probe.

The row of the last token of a prefix is in the pass anyway. The probe reads it there,
so that a verdict takes no row. The target is still asked at the guard's share of
boundaries, and at all boundaries while the guard holds the probe for wrong.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from sglang_parse.engine.outcome import ScoreRows, suffix_scores, suffix_verdict
from sglang_parse.engine.verdict_source import Scores
from sglang_parse.options.extensions import ExtensionError
from sglang_parse.probe.linear_probe import Probe
from sglang_parse.probe.pair_file import PairFile
from sglang_parse.probe.probe_guard import ProbeGuard
from sglang_parse.requests.round_records import RequestRound, Round, Verdict

logger = logging.getLogger(__name__)

# The planner's choices are kept while the rows of a verdict stay within such a step.
ROWS_STEP = 0.5


@dataclass(frozen=True)
class RoundParts:
    """What the engine has for a source of verdicts.

    judge: scores verdict rows. on_error: told what it raises.
    """

    target: Any
    slots: Any
    ranks: Any
    view: Any
    judge: ScoreRows
    on_error: Callable[[ExtensionError], None]


class ProbeVerdicts:
    """`VerdictSource`: chooses who judges each boundary, and merges the verdicts.

    judge: scores verdict rows. on_error: told what it raises. probe: None where the
    server only writes pairs. guard: None where nothing compares the probe. pairs: None
    where none are written; question: whose verdicts they hold.
    """

    def __init__(
        self,
        judge: ScoreRows,
        on_error: Callable[[ExtensionError], None],
        probe: Probe | None,
        guard: ProbeGuard | None = None,
        pairs: PairFile | None = None,
        question: str = "",
    ) -> None:
        self.judge = judge
        self.on_error = on_error
        self.probe = probe
        self.guard = guard
        self.pairs = pairs
        self.question = question

    # -- Before the pass -------------------------------------------------------

    def open(self, round: Round) -> None:
        if self.guard is not None and not self.guard.holds:
            return
        share = self.guard.current_share if self.guard is not None else 0.0
        for r in round:
            if r.state.judge_kind != "suffix":
                rows = share * len(r.state.suffix)
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
        scores = suffix_scores(round, round.output.logits, self.judge, self.on_error)
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
        suffixes, probed = read[: len(round)], read[len(round) :]
        for r, scores, own in zip(round, suffixes, probed, strict=True):
            r.verdict = suffix_verdict(scores)
            if r.verdict.has_failed:
                continue
            asked = dict(zip(r.segments.suffix_boundaries, scores, strict=True))
            self._collect(round, r)
            if not own or not r.boundaries:
                continue
            self._compare(r, asked, own)
            if r.rows_per_verdict is not None:
                self._merge(r, asked, own)

    def _collect(self, round: Round, r: RequestRound) -> None:
        """Keep the target's verdicts on drafts; a client's text is none."""
        options, asked = r.state.options, r.segments.suffix_boundaries
        usual = options.judge_suffix == self.question
        if self.pairs is None or not (usual and asked) or r.state.client:
            return
        states = round.output.states_at([r.root_row + b for b in asked])
        self.pairs.add(
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
        threshold, cutoff = r.state.options.threshold, self._cutoff(r)
        for b, found in zip(r.boundaries, own, strict=True):
            if b in asked:
                agrees = (asked[b] >= threshold) == (found >= cutoff)
                if told := self.guard.compare(agrees=agrees):
                    logger.warning("PARSE: %s.", told)

    def _cutoff(self, r: RequestRound) -> float:
        assert self.probe is not None
        return self.probe.cutoffs[r.state.options.segmenter]

    def _merge(self, r: RequestRound, asked: Mapping[int, float], own: Scores) -> None:
        """The target's scores where it was asked, the probe's elsewhere."""
        pairs = list(zip(r.boundaries, own, strict=True))
        cutoff, threshold = self._cutoff(r), r.state.options.threshold
        r.verdict = Verdict(
            scores=tuple(asked.get(b, found) for b, found in pairs),
            thresholds=tuple(threshold if b in asked else cutoff for b, _ in pairs),
            judged_by=tuple("suffix" if b in asked else "probe" for b, _ in pairs),
        )
