"""Questions with a number for an answer, to calibrate the real model on.

    python -m benchmarks.real_questions --out questions.jsonl
    sglang-parse calibrate --prompts questions.jsonl --problems 149 --screen 32 \\
        --budget 2 --out benchmarks/results/real/calibrated.json

Sums in steps and comparisons of two numbers, in turns; the model explains, and the last
number that it writes is its answer.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path

from benchmarks.judge_steps import arithmetic, comparison


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n\n")[0],
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines, new")
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=7)
    args = parser.parse_args()
    lines = [json.dumps(row) for row in questions(args.count, args.seed)]
    args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


def questions(count: int, seed: int) -> list[dict[str, str]]:
    """`prompt` and `answer` of each; same arguments, same questions."""
    rng = random.Random(seed)
    return [one_question(rng, i) for i in range(count)]


def one_question(rng: random.Random, index: int) -> dict[str, str]:
    if index % 2:
        # An even index: a sentence whose first number is the larger one.
        steps = comparison(rng, rng.choice((0, 2)))
        answer = steps.steps[0].split()[0]
        ask = "Explain in one sentence, then write the number alone."
    else:
        steps = arithmetic(rng, 0)
        answer = steps.steps[-1].split()[-1].rstrip(".")
        ask = "Write each step, then the sum."
    return {"prompt": f"{steps.question} {ask}", "answer": answer}


if __name__ == "__main__":
    main()
