"""Finished cells -> figures per arm, data set and concurrency. Pure."""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.harness.cells import (
    BASELINE,
    Cell,
    CellResult,
    options_label,
)
from benchmarks.harness.procedures import Answer
from benchmarks.harness.stats import (
    JudgeQuality,
    PairedDifference,
    judge_quality,
    paired_difference,
    speed_ratio,
    wilson_interval,
)
from sglang_parse.demo.figures import ArmSummary, RequestResult, summarise

Ratio = tuple[float, float, float]


@dataclass(frozen=True)
class Graded:
    """A cell with its grades (grade.grade_cell)."""

    result: CellResult
    grades: Mapping[str, Any]

    @property
    def cell(self) -> Cell:
        return self.result.cell


@dataclass(frozen=True)
class Figures:
    """One arm, data set and concurrency; None: not measured.

    Repeats ask the same items again, so they make no sample larger: whether an item is
    right, its time and its tokens are means over them, also under the intervals.
    Latency quantiles are of all requests.

    figures: see summary.ArmSummary; its problems are items. answer_ratio, token_ratio:
    (ratio, low, high) of answers and of output tokens per second to the baseline on the
    same items. asked: the options that `options` names. ratio_by_repeat: answer ratios
    one repeat at a time. accept_length:
    output tokens per decode pass of the target. kept_share: drafted tokens (draft
    model, head, client) that stayed. rating: of open answers, 1 to 10; share_rated: of
    them. scores, valid:
    verdicts that have gold.
    """

    arm: str
    options: str
    dataset: str
    concurrency: int
    is_sweep: bool
    is_graded: bool
    figures: ArmSummary
    tokens_per_answer: float
    difference: PairedDifference | None = None
    answer_ratio: Ratio | None = None
    token_ratio: Ratio | None = None
    asked: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    ratio_by_repeat: tuple[float, ...] = ()
    accept_length: float | None = None
    kept_share: float | None = None
    rating: float | None = None
    share_rated: float = 0.0
    judge: JudgeQuality | None = None
    scores: tuple[float, ...] = ()
    valid: tuple[bool, ...] = ()
    latencies: tuple[float, ...] = ()
    ttfts: tuple[float, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """For summary.json: without the values of single requests."""
        values = dataclasses.asdict(self)
        for name in ("scores", "valid", "latencies", "ttfts"):
            values.pop(name)
        if not self.is_graded:
            unknown = dict.fromkeys(("accuracy", "accuracy_low", "accuracy_high"))
            values["figures"] |= unknown
        return values


def summarise_cells(graded: Sequence[Graded], threshold: float) -> list[Figures]:
    """Figures in the order of the cells. threshold: where options name none."""
    groups: dict[tuple[Any, ...], list[Graded]] = {}
    for one in graded:
        cell = one.cell
        label = options_label(cell.options)
        key = (cell.is_sweep, cell.arm, label, cell.dataset, cell.concurrency)
        groups.setdefault(key, []).append(one)
    found = []
    for (_, _, _, dataset, concurrency), group in groups.items():
        base = groups.get((False, BASELINE, "", dataset, concurrency), [])
        if base is not group:
            base = in_turns(base, group[0].cell)
        found.append(_figures(group, base, threshold))
    return found


def in_turns(base: Sequence[Graded], cell: Cell) -> list[Graded]:
    """Of the baseline's results those that took turns with the cell's arm, or were
    measured with any other where none did."""
    groups = {b.cell.group for b in base}
    group = cell.group if cell.group in groups else min(groups, default=0)
    return [b for b in base if b.cell.group == group]


def _figures(
    group: Sequence[Graded], base: Sequence[Graded], threshold: float
) -> Figures:
    cell = group[0].cell
    turns = [a for g in group for answers in g.result.answers for a in answers]
    results = [r for g in group for r in request_results(g).values()]
    wall_s = sum(g.result.wall_s for g in group)
    correct = [c for g in group for c in g.grades["correct"]]
    judged = group[0].grades["judged"]  # repeats ask about much the same again
    ratings = [r for g in group for r in g.grades["ratings"] or () if r is not None]
    arm_options = cell.spec["arm"]["options"]
    limit = {**arm_options, **cell.options}.get("parse_threshold", threshold)
    repeats = list(zip(group, base, strict=False))
    pairs = _pairs([g for g, _ in repeats], [b for _, b in repeats])
    is_graded = all(c is not None for c in correct)
    is_base = group is base
    items = list(over_repeats(group).values())
    num_right = sum(r.right for r in items)
    low, high = wilson_interval(num_right, len(items))
    return Figures(
        arm=cell.arm,
        options=options_label(cell.options),
        asked=cell.options,
        dataset=cell.dataset,
        concurrency=cell.concurrency,
        is_sweep=cell.is_sweep,
        is_graded=is_graded,
        figures=dataclasses.replace(
            summarise(cell.arm, cell.concurrency, results, wall_s),
            problems=len(items),
            accuracy=num_right / len(items) if is_graded else math.nan,
            accuracy_low=low if is_graded else math.nan,
            accuracy_high=high if is_graded else math.nan,
            kept_per_pass=None,
        ),
        tokens_per_answer=sum(r.num_tokens for r in results) / len(results),
        difference=_difference(pairs) if is_graded and not is_base else None,
        answer_ratio=_ratio(pairs, lambda r: 1.0),
        token_ratio=_ratio(pairs, lambda r: r.num_tokens),
        ratio_by_repeat=tuple(
            ratio[0]
            for one, other in repeats
            if (ratio := _ratio(_pairs([one], [other]), lambda r: 1.0))
        ),
        accept_length=_accept_length(turns),
        kept_share=_kept_share(turns),
        rating=sum(ratings) / len(ratings) if ratings else None,
        share_rated=len(ratings) / len(correct),
        judge=_judge(judged, limit) if judged else None,
        scores=tuple(row[0] for row in judged),
        valid=tuple(row[1] for row in judged),
        latencies=tuple(r.latency_s for r in results),
        ttfts=tuple(r.ttft_s for r in results),
    )


def _judge(judged: Sequence[Sequence[Any]], threshold: float) -> JudgeQuality:
    scores, valid, first_invalid = zip(*judged, strict=True)
    return judge_quality(scores, valid, first_invalid, threshold)


def request_results(one: Graded) -> dict[str, RequestResult]:
    """By item: its turns' times and tokens added up, the first turn's first token."""
    rows = {}
    for item, answers, correct in zip(
        one.result.ids, one.result.answers, one.grades["correct"], strict=True
    ):
        passes = sum(a.target_passes for a in answers)
        rows[item] = RequestResult(
            text=answers[-1].text,
            token_ids=answers[-1].token_ids,
            num_tokens=sum(a.num_tokens for a in answers),
            correct=bool(correct),
            latency_s=sum(a.latency_s for a in answers),
            ttft_s=answers[0].ttft_s,
            report={"target_passes": passes, "kept_tokens": 0},
        )
    return rows


@dataclass(frozen=True)
class ItemResult:
    """Means of an item over all repeats; right: the share of them."""

    right: float
    num_tokens: float
    latency_s: float


def over_repeats(group: Sequence[Graded]) -> dict[str, ItemResult]:
    """By item, of those that every repeat has."""
    repeats = [request_results(g) for g in group]
    found = {}
    for item in repeats[0] if repeats else ():
        rows = [r[item] for r in repeats if item in r]
        if len(rows) == len(repeats):
            found[item] = ItemResult(
                right=statistics.fmean(r.correct for r in rows),
                num_tokens=statistics.fmean(r.num_tokens for r in rows),
                latency_s=statistics.fmean(r.latency_s for r in rows),
            )
    return found


Pair = tuple[ItemResult, ItemResult]


def _pairs(group: Sequence[Graded], base: Sequence[Graded]) -> list[Pair]:
    """The group's and the baseline's results of the same items."""
    theirs = over_repeats(base)
    ours = over_repeats(group).items()
    return [(mine, theirs[item]) for item, mine in ours if item in theirs]


def _difference(pairs: Sequence[Pair]) -> PairedDifference | None:
    if not pairs:
        return None
    return paired_difference([a.right for a, _ in pairs], [b.right for _, b in pairs])


def _ratio(pairs: Sequence[Pair], amount: Any) -> Ratio | None:
    if not pairs:
        return None
    ours, theirs = zip(*pairs, strict=True)
    return speed_ratio(
        [amount(r) for r in ours],
        [r.latency_s for r in ours],
        [amount(r) for r in theirs],
        [r.latency_s for r in theirs],
    )


def _accept_length(turns: Sequence[Answer]) -> float | None:
    num_passes = sum(a.target_passes for a in turns)
    # One token a pass throughout: nothing speculates.
    is_plain = all(a.target_passes == max(0, a.num_tokens - 1) for a in turns)
    if not num_passes or is_plain:
        return None
    return sum(a.num_tokens for a in turns) / num_passes


def _kept_share(turns: Sequence[Answer]) -> float | None:
    names = ("draft_tokens", "eagle_draft_tokens", "client_tokens")
    num_drafted = sum(a.counters.get(name, 0) for a in turns for name in names)
    num_kept = sum(a.counters.get("kept_tokens", 0) for a in turns)
    return num_kept / num_drafted if num_drafted else None
