"""Finished cells -> what was right, and the judge's verdicts against gold steps.

Done after a cell is measured, so that checkers take no time from servers; a cell's
grades lie beside it and are made again when that file is deleted.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from http.client import HTTPException
from typing import Any

from benchmarks import embedded_answers
from benchmarks.harness.cells import Cell, CellResult
from benchmarks.harness.checkers import is_right, rate
from benchmarks.harness.datasets import DATA_SETS, Item
from benchmarks.harness.procedures import Answer
from sglang_parse.embedded import task

logger = logging.getLogger(__name__)

# Requests in flight to the model that rates, and tries of each.
NUM_RATERS = 8
TRIES = 3
Decode = Callable[[Sequence[int]], str]


def grade_cell(
    result: CellResult,
    items: Sequence[Item],
    *,
    decode: Decode,
    judge: Mapping[str, str],
    ratings: Sequence[float | None] | None = None,
) -> dict[str, Any]:
    """correct: per item true, false or null. ratings: per item, or null; those given
    are not asked for again. judged: one [score, valid, is first invalid prefix of its
    draft] per verdict with gold."""
    checker = DATA_SETS[result.cell.dataset].checker
    if tuple(item.id for item in items) != result.ids:
        raise ValueError(
            f"{result.cell.name} was measured on other items than "
            f"{result.cell.dataset} holds now; give another --out or delete its file."
        )
    pairs = list(zip(items, result.answers, strict=True))
    judged: list[list[Any]] = []
    if result.cell.dataset == "embedded":
        for item, answers in pairs:
            judged += judged_prefixes(item.reference, answers[-1], decode)
    if checker == "rating" and judge.get("url"):
        before = ratings or [None] * len(pairs)

        def rate_one(place: int) -> float | None:
            item, answers = pairs[place]
            known = before[place]
            if known is not None:
                return known
            return rate_patiently(item, [a.text for a in answers], judge)

        with ThreadPoolExecutor(NUM_RATERS) as threads:
            ratings = list(threads.map(rate_one, range(len(pairs))))

    def check(pair: tuple[Item, Sequence[Answer]]) -> bool | None:
        item, answers = pair
        return is_right(checker, item, answers[-1].text)

    # Only programs are worth threads: math-verify wants the main one.
    if checker == "code":
        with ThreadPoolExecutor(os.cpu_count()) as threads:
            correct = list(threads.map(check, pairs))
    else:
        correct = [check(pair) for pair in pairs]
    return {"correct": correct, "ratings": ratings, "judged": judged}


def rate_patiently(
    item: Item, texts: Sequence[str], judge: Mapping[str, str]
) -> float | None:
    """The mean rating of an item's turns, None where one of them has none.

    A rater that fails is asked `TRIES` times: the report is not lost for one answer
    that nobody rates.
    """
    ratings = []
    for end in range(1, len(texts) + 1):
        rating = None
        for number in range(TRIES):
            try:
                rating = rate(item, texts[:end], judge)
                break
            except (OSError, HTTPException, LookupError, TypeError, ValueError) as e:
                logger.warning("Rating of %s failed: %s", item.id, e)
                time.sleep(2.0**number)
        if rating is None:
            return None
        ratings.append(rating)
    return sum(ratings) / len(ratings) if ratings else None


def lacks_ratings(grades: Mapping[str, Any]) -> bool:
    """Whether a rater that was down is to be asked again."""
    return None in (grades["ratings"] or ())


def rated(cell: Cell) -> bool:
    """Whether a cell's answers are open ones, which a model rates."""
    return DATA_SETS[cell.dataset].checker == "rating"


def judged_prefixes(
    problem: task.Problem, answer: Answer, decode: Decode
) -> list[list[Any]]:
    """[score, valid, first invalid] of every judged prefix of an embedded answer."""
    rows = []
    for r in answer.rounds:
        before, seen_invalid = answer.token_ids[: r.at], False
        for end, score in zip(r.ends, r.scores, strict=True):
            text = decode([*before, *r.draft[:end]])
            valid = prefix_is_valid(problem, text)
            rows.append([score, valid, not valid and not seen_invalid])
            seen_invalid = seen_invalid or not valid
    return rows


def prefix_is_valid(problem: task.Problem, text: str) -> bool:
    """Whether some right answer begins with `text`, which may end inside a segment."""
    segments = embedded_answers.split_segments(text)
    if embedded_answers.first_error(problem, text) is None:
        return True
    whole = text
    if segments and not segments[-1].endswith("\n"):
        whole = text[: len(text) - len(segments[-1])]
        if embedded_answers.first_error(problem, whole) is not None:
            return False
        gold = embedded_answers.gold_segments(problem)
        place = len(segments) - 1
        return place < len(gold) and any(
            g.startswith(segments[-1]) for g in gold[place]
        )
    return False
