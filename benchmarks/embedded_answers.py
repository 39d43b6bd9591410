"""Answers to problems of the embedded task: right ones, wrong ones and a gold checker.

Each line of an answer is a segment that can be checked on its own against the problem.
Of the phrasings A is the target's style, B the draft's.
"""

from __future__ import annotations

import re

from sglang_parse.embedded.task import GAINS, Problem

# Odd steps take the first phrasing of a style, even steps the second.
PHRASINGS = {
    "A1": "Step {i}: {name} had {prev} and {verb} {amount}, so now {total}.\n",
    "A2": "Step {i}: from {prev} {name} {verb} {amount} and has {total}.\n",
    "B1": "Step {i}: we take {prev} {sign} {amount} and get {total}.\n",
    "B2": "Step {i}: it was {prev}, {word} {amount} makes {total}.\n",
}
ANSWER_LINE = "Answer: {total}"


def own_phrasing(style: str, i: int) -> str:
    """Phrasing which style "A" or "B" prefers for step i (counted from 1)."""
    return f"{style}{2 - i % 2}"


def render_step(problem: Problem, i: int, phrasing: str, /, **wrong: object) -> str:
    """Line of step i (from 1); `wrong` overrides i, prev, verb, amount or total."""
    verb, amount = problem.events[i - 1]
    values: dict[str, object] = {
        "i": i,
        "name": problem.name,
        "prev": problem.totals[i - 1],
        "verb": verb,
        "amount": amount,
        "total": problem.totals[i],
    }
    values |= wrong
    gain = values["verb"] in GAINS
    values |= {"sign": "+" if gain else "-", "word": "plus" if gain else "minus"}
    return PHRASINGS[phrasing].format(**values)


def render_answer(problem: Problem, phrasings: list[str] | str) -> str:
    """The whole right answer; phrasings per step, or "A" / "B" for a pure style."""
    steps = range(1, len(problem.events) + 1)
    if isinstance(phrasings, str):
        phrasings = [own_phrasing(phrasings, i) for i in steps]
    lines = [render_step(problem, i, phrasings[i - 1]) for i in steps]
    return "".join(lines) + ANSWER_LINE.format(total=problem.answer)


def split_segments(text: str) -> list[str]:
    """Segments of an answer: lines with their newline; the last one may have none."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def gold_segments(problem: Problem) -> list[set[str]]:
    """For each segment of a right answer, every text that the checker accepts."""
    steps = range(1, len(problem.events) + 1)
    accepted = [{render_step(problem, i, p) for p in PHRASINGS} for i in steps]
    return [*accepted, {ANSWER_LINE.format(total=problem.answer)}]


def first_error(problem: Problem, text: str) -> int | None:
    """Index (from 0) of the first wrong segment, None if every segment is right.

    A right but unfinished answer, cut after a segment, has no error; a segment cut in
    its middle is wrong, and so is anything after the answer line.
    """
    gold = gold_segments(problem)
    for k, segment in enumerate(split_segments(text)):
        if k >= len(gold) or segment not in gold[k]:
            return k
    return None
