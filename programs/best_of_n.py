"""Best of n over judged prefixes: branches are forks of the longest valid prefix.

Each round forks n continuations of the prefix shared so far, judges each in one pass,
and makes the longest valid one the next shared prefix. The radix cache holds it, so
the n branches pay for their own text only.

    python -m programs.best_of_n --question "..." --n 4
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sglang as sgl
from sglang.lang.ir import SglConstantText

from programs.common import (
    arguments,
    connect,
    embedded_problem,
    is_valid,
    report,
    text,
)
from sglang_parse import parse_gen, parse_verify


@dataclass(frozen=True)
class Branch:
    """prefix: valid characters. weakest: lowest score of a step."""

    answer: str
    prefix: str
    weakest: float
    is_valid: bool = False

    @property
    def rank(self) -> tuple[bool, int, float]:
        length = 0 if self.is_valid else len(self.prefix)
        return self.is_valid, length, self.weakest


@sgl.function
def search(s, question, n, rounds, threshold, temperature):
    s += sgl.user(question)
    prefix = ""
    best = Branch("", "", 0.0)
    for _ in range(rounds):
        branches = s.fork(n)
        branches += sgl.assistant_begin()
        branches += SglConstantText(prefix)
        branches += parse_gen("rest", 512, temperature=temperature)
        answers = [prefix + text(branch, "rest") for branch in branches]
        answers = [answer for answer in answers if answer.strip()]
        judges = s.fork(max(1, len(answers)))
        for judge, answer in zip(judges, answers, strict=False):
            judge += sgl.assistant_begin()
            judge += parse_verify("valid", answer, threshold=threshold)
        for judge, answer in zip(judges, answers, strict=False):
            scores = report(judge, "valid")["scores"]
            branch = Branch(
                answer, text(judge, "valid"), min(scores), is_valid(judge, "valid")
            )
            best = max(best, branch, key=lambda b: b.rank)
        prefix = best.prefix
        if best.is_valid:
            break
    s += sgl.assistant(best.answer)
    return best


def main(argv: Sequence[str] | None = None) -> Branch:
    parser = arguments(__doc__)
    parser.add_argument("--n", type=int, default=4, help="branches a round; default: 4")
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--threshold", type=float, default=0.5, metavar="X")
    parser.add_argument("--temperature", type=float, default=0.7, metavar="T")
    args = parser.parse_args(argv)
    question = args.question or embedded_problem(args).prompt
    state = search.run(
        question,
        args.n,
        args.rounds,
        args.threshold,
        args.temperature,
        backend=connect(args),
    )
    best: Branch = state.ret_value
    print(best.answer)
    verdict = "valid" if best.is_valid else f"valid up to character {len(best.prefix)}"
    print(f"judged {verdict}; lowest score of a step {best.weakest:.3f}")
    return best


if __name__ == "__main__":
    main()
