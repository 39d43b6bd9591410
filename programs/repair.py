"""Solve, verify, repair: keep the valid prefix of a failed answer and go on from it.

python -m programs.repair --question "..." --answer FILE
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sglang as sgl

from programs.common import (
    arguments,
    connect,
    embedded_problem,
    is_valid,
    text,
    text_file,
)
from programs.grade import wrong_solution
from sglang_parse import parse_gen, parse_verify


@dataclass(frozen=True)
class Repair:
    """kept: characters of the failed answer before each round that were kept."""

    answer: str
    is_valid: bool
    kept: tuple[int, ...]


@sgl.function
def repair(s, question, answer, rounds, threshold):
    """Up to `rounds` times: judge the answer, keep what holds, write the rest anew.

    answer: the failed one; an empty one is solved first.
    """
    s += sgl.user(question)
    kept: list[int] = []
    holds = False
    for k in range(rounds + 1):
        attempt = s.fork(1)[0]
        attempt += sgl.assistant_begin()
        valid = ""
        if answer.strip():
            attempt += parse_verify("valid", answer, threshold=threshold)
            valid = text(attempt, "valid")
            holds = is_valid(attempt, "valid")
        if holds or k == rounds:
            break
        kept.append(len(valid))
        # The same prefix would go wrong in the same way again.
        temperature = 0.7 if len(kept) > 1 and kept[-1] == kept[-2] else 0.0
        attempt += parse_gen("rest", 512, temperature=temperature, threshold=threshold)
        answer = valid + text(attempt, "rest")
    s += sgl.assistant(answer)
    return Repair(answer, holds, tuple(kept))


def main(argv: Sequence[str] | None = None) -> Repair:
    parser = arguments(__doc__)
    parser.add_argument(
        "--answer", type=text_file, metavar="FILE", help="the failed one"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument(
        "--threshold", type=float, metavar="X", help="default: the server's"
    )
    args = parser.parse_args(argv)
    answer = args.answer or ""
    question = args.question
    if not question:
        problem = embedded_problem(args)
        question, answer = problem.prompt, answer or wrong_solution(problem)
    state = repair.run(
        question, answer, args.rounds, args.threshold, backend=connect(args)
    )
    result: Repair = state.ret_value
    for k, num_kept in enumerate(result.kept, 1):
        print(f"round {k}: kept {num_kept} characters, wrote the rest anew")
    print(result.answer)
    print("judged valid" if result.is_valid else "still not judged valid")
    return result


if __name__ == "__main__":
    main()
