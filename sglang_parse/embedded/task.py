"""Day-by-day counting problems, which the embedded pair was trained for.

An answer is one line per day, `Step i: ...` with the previous total, the amount and the
new total, and a last line `Answer: N`.
"""

from __future__ import annotations

import random
import re
import zlib
from dataclasses import dataclass

NAMES = ("Tom", "Ana", "Ben", "Eva", "Sam", "Mia")
NOUNS = ("coins", "books", "cards", "pens", "shells", "apples")
GAINS = ("finds", "wins", "buys")
LOSSES = ("loses", "sells", "drops")
MAX_TOTAL = 20
MAX_AMOUNT = 9
MIN_STEPS, MAX_STEPS = 4, 7
HELD_OUT = 8  # one prompt in HELD_OUT, chosen by its CRC, is kept out of training


@dataclass(frozen=True)
class Problem:
    """A start count and one (verb, amount) event per day."""

    name: str
    noun: str
    start: int
    events: tuple[tuple[str, int], ...]

    def __post_init__(self) -> None:
        if not all(0 <= total <= MAX_TOTAL for total in self.totals):
            raise ValueError(f"totals {self.totals} leave 0..{MAX_TOTAL}")

    @property
    def totals(self) -> tuple[int, ...]:
        """Counts before day 1 and after each day, len(events) + 1 of them."""
        totals = [self.start]
        for verb, amount in self.events:
            totals.append(totals[-1] + (amount if verb in GAINS else -amount))
        return tuple(totals)

    @property
    def answer(self) -> int:
        return self.totals[-1]

    @property
    def prompt(self) -> str:
        """The user turn."""
        days = "".join(
            f" Day {i}: {verb} {amount}."
            for i, (verb, amount) in enumerate(self.events, 1)
        )
        return (
            f"{self.name} has {self.start} {self.noun}.{days}"
            f" How many {self.noun} does {self.name} have now?"
        )


def make_problems(n: int, seed: int, split: str = "eval") -> list[Problem]:
    """n problems from a seeded generator; same arguments, same problems.

    split "eval" yields only prompts whose CRC32 is divisible by HELD_OUT, "train" only
    the others, so no seed of one split can produce a problem of the other.
    """
    if split not in ("train", "eval"):
        raise ValueError(f"split {split!r}, expected 'train' or 'eval'")
    rng = random.Random(f"{split}-{seed}")
    problems: list[Problem] = []
    while len(problems) < n:
        problem = _random_problem(rng)
        if is_held_out(problem) == (split == "eval"):
            problems.append(problem)
    return problems


def is_held_out(problem: Problem) -> bool:
    """Whether the problem belongs to the eval split."""
    return zlib.crc32(problem.prompt.encode()) % HELD_OUT == 0


def _random_problem(rng: random.Random) -> Problem:
    total = start = rng.randint(1, MAX_TOTAL - 1)
    events = []
    for _ in range(rng.randint(MIN_STEPS, MAX_STEPS)):
        gains, losses = MAX_TOTAL - total, total  # room in each direction
        gain = losses == 0 or (gains > 0 and rng.random() < 0.5)
        amount = rng.randint(1, min(MAX_AMOUNT, gains if gain else losses))
        events.append((rng.choice(GAINS if gain else LOSSES), amount))
        total += amount if gain else -amount
    return Problem(rng.choice(NAMES), rng.choice(NOUNS), start, tuple(events))


def check_answer(problem: Problem, text: str) -> bool:
    """Whether the text ends in the right answer line; the steps are not looked at."""
    match = re.search(r"(?:^|\n)Answer: (\d+)\s*$", text)
    return match is not None and int(match.group(1)) == problem.answer
