"""Grade a given solution step by step: every prefix of it is judged in one pass.

python -m programs.grade --question "..." --solution FILE
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sglang as sgl

from benchmarks.embedded_answers import render_step, split_segments
from programs.common import arguments, connect, embedded_problem, report, text_file
from sglang_parse import parse_verify
from sglang_parse.embedded.task import Problem


@dataclass(frozen=True)
class Grade:
    """scores: of each step with all before it. num_right: steps before the first error.

    target_passes: forwards of the target, however many steps there are.
    """

    steps: tuple[str, ...]
    scores: tuple[float, ...]
    num_right: int
    target_passes: int


@sgl.function
def judge(s, question, steps, threshold):
    s += sgl.user(question)
    s += sgl.assistant(parse_verify("check", list(steps), threshold=threshold))
    result = report(s, "check")
    return Grade(
        steps=tuple(steps),
        scores=tuple(result["scores"]),
        num_right=result["cut"]["segments"],
        target_passes=result["target_passes"],
    )


def wrong_solution(problem: Problem) -> str:
    """An answer to an embedded problem that goes wrong in its third step."""
    total = problem.totals[3]
    wrong = total + 1 if total < 20 else total - 1
    lines = [render_step(problem, i, "B1") for i in (1, 2)]
    lines.append(render_step(problem, 3, "B1", total=wrong))
    return "".join(lines) + f"Answer: {wrong}"


def main(argv: Sequence[str] | None = None) -> Grade:
    parser = arguments(__doc__)
    parser.add_argument("--solution", type=text_file, metavar="FILE")
    parser.add_argument("--threshold", type=float, default=0.5, metavar="X")
    args = parser.parse_args(argv)
    if bool(args.question) != bool(args.solution):
        parser.error("--question and --solution go together.")
    if args.question:
        question, solution = args.question, args.solution
    else:
        problem = embedded_problem(args)
        question, solution = problem.prompt, wrong_solution(problem)
    steps = [step for step in split_segments(solution) if step.strip()]
    state = judge.run(question, steps, args.threshold, backend=connect(args))
    grade: Grade = state.ret_value
    for k, (step, score) in enumerate(zip(grade.steps, grade.scores, strict=True)):
        verdict = "right" if k < grade.num_right else "wrong"
        verdict = "after" if k > grade.num_right else verdict
        print(f"{score:.3f}  {verdict}  {step.rstrip()}")
    total = len(grade.steps)
    print(f"{grade.num_right} of {total} steps stand ({grade.target_passes} pass).")
    return grade


if __name__ == "__main__":
    main()
