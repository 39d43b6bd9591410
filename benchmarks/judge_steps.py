"""Steps with a known verdict, for benchmarks/real_judge.py. Pure."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

FACTS = (
    ("capital of France", "Paris", "Lyon"),
    ("capital of Japan", "Tokyo", "Osaka"),
    ("capital of Italy", "Rome", "Milan"),
    ("capital of Egypt", "Cairo", "Lagos"),
    ("capital of Canada", "Ottawa", "Toronto"),
    ("capital of Spain", "Madrid", "Lisbon"),
    ("capital of Russia", "Moscow", "Minsk"),
    ("capital of Greece", "Athens", "Sofia"),
    ("capital of Austria", "Vienna", "Munich"),
    ("capital of Poland", "Warsaw", "Prague"),
    ("largest planet", "Jupiter", "Mars"),
    ("planet closest to the Sun", "Mercury", "Neptune"),
    ("largest ocean", "the Pacific", "the Arctic"),
    ("longest river in Africa", "the Nile", "the Rhine"),
    ("highest mountain on Earth", "Mount Everest", "Mont Blanc"),
    ("chemical symbol of gold", "Au", "Pb"),
    ("chemical symbol of iron", "Fe", "Na"),
    ("chemical formula of water", "H2O", "CO2"),
    ("number of days in a week", "seven", "nine"),
    ("number of legs of a spider", "eight", "six"),
    ("number of sides of a triangle", "three", "five"),
    ("language spoken in Brazil", "Portuguese", "German"),
    ("author of Hamlet", "William Shakespeare", "Charles Dickens"),
    ("painter of the Mona Lisa", "Leonardo da Vinci", "Claude Monet"),
    ("fastest land animal", "the cheetah", "the turtle"),
    ("largest land animal", "the elephant", "the horse"),
    ("freezing point of water in Celsius", "0 degrees", "50 degrees"),
    ("organ that pumps blood", "the heart", "the liver"),
    ("gas that plants take in", "carbon dioxide", "helium"),
    ("star nearest to Earth", "the Sun", "Sirius"),
)


@dataclass(frozen=True)
class Steps:
    """An answer in steps to one question."""

    kind: str
    question: str
    #: Texts; each prefix of them is judged.
    steps: tuple[str, ...]
    #: Whether everything up to and with each step is right.
    gold: tuple[bool, ...]


def fact(rng: random.Random, index: int) -> Steps:
    """One sentence; facts in turn, right for every other round through them."""
    what, right, wrong = FACTS[index // 2 % len(FACTS)]
    is_right = index % 2 == 0
    sentence = f"The {what} is {right if is_right else wrong}."
    return Steps("fact", f"What is the {what}?", (sentence,), (is_right,))


def arithmetic(rng: random.Random, index: int) -> Steps:
    """Three additions, one after the other; every other answer has one wrong sum."""
    numbers = [rng.randint(2, 30) for _ in range(4)]
    wrong_at = rng.randrange(3) if index % 2 else None
    total, lines = numbers[0], []
    for k, number in enumerate(numbers[1:]):
        shown = total + number
        if k == wrong_at:
            shown += rng.choice((-10, -2, -1, 1, 2, 10))
        lines.append(f"Step {k + 1}: {total} + {number} = {shown}.\n")
        total = shown
    gold = tuple(wrong_at is None or k < wrong_at for k in range(3))
    question = f"Add {', '.join(map(str, numbers))} one after the other."
    return Steps("arithmetic", question, tuple(lines), gold)


def comparison(rng: random.Random, index: int) -> Steps:
    """One sentence about two numbers. Of four in turn, two are right, and one of these
    and one of the wrong ones name the numbers in the question's order."""
    small, large = sorted(rng.sample(range(1, 100), 2))
    is_right, asks_small_first = index % 2 == 0, index // 2 % 2 == 0
    a, b = (large, small) if is_right else (small, large)
    asked = (small, large) if asks_small_first else (large, small)
    question = f"Which is larger, {asked[0]} or {asked[1]}?"
    return Steps("comparison", question, (f"{a} is larger than {b}.",), (is_right,))


MAKERS: dict[str, Callable[[random.Random, int], Steps]] = {
    "arithmetic": arithmetic,
    "fact": fact,
    "comparison": comparison,
}


def make_steps(count: int, seed: int) -> list[Steps]:
    """`count` of each kind; same arguments, same steps."""
    rng = random.Random(seed)
    return [make(rng, i) for make in MAKERS.values() for i in range(count)]


def auc(right: list[float], wrong: list[float]) -> float:
    """Chance that a right step scores above a wrong one; a tie counts half."""
    if not right or not wrong:
        raise ValueError("AUC needs a right and a wrong step.")
    wins = sum((a > b) + 0.5 * (a == b) for a in right for b in wrong)
    return wins / (len(right) * len(wrong))


def auc_interval(
    right: list[float], wrong: list[float], seed: int = 0, rounds: int = 1000
) -> tuple[float, float]:
    """95% interval by resampling both groups."""
    rng = random.Random(seed)
    found = sorted(
        auc(rng.choices(right, k=len(right)), rng.choices(wrong, k=len(wrong)))
        for _ in range(rounds)
    )
    return found[round(0.025 * rounds)], found[round(0.975 * rounds) - 1]


def accept_rates(
    right: list[float], wrong: list[float], thresholds: tuple[float, ...]
) -> list[dict[str, float]]:
    """Shares of right and of wrong steps that reach each threshold."""
    return [
        {
            "threshold": t,
            "right_accepted": sum(s >= t for s in right) / len(right),
            "wrong_accepted": sum(s >= t for s in wrong) / len(wrong),
        }
        for t in thresholds
    ]
