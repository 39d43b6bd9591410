"""A draft from another program: a cheap tool writes the answer, the target judges it.

The default tool is a regular expression that takes "sells" for a gain, so its answers
are often wrong from some step on; up to there they cost one pass of the target.

    python -m programs.tool_draft --question "..." --draft FILE
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import sglang as sgl

from programs.common import arguments, connect, embedded_problem, report, text_file
from sglang_parse import parse_gen
from sglang_parse.embedded.task import check_answer


@dataclass(frozen=True)
class Answer:
    """counts of tokens in the answer by who wrote them, and target passes."""

    text: str
    from_tool: int
    from_draft_model: int
    from_target: int
    target_passes: int


def adding_tool(question: str) -> str:
    """Steps of a problem of the embedded task, with "sells" taken for a gain.

    Raises ValueError on any other question.
    """
    start = re.search(r"has (\d+)", question)
    if start is None:
        raise ValueError(
            f"The adding tool cannot read {question[:60]!r}; give --draft."
        )
    total = int(start.group(1))
    lines = []
    for day, verb, amount in re.findall(r"Day (\d+): (\w+) (\d+)", question):
        sign = "-" if verb in ("loses", "drops") else "+"
        before, total = total, total + int(sign + amount)
        lines.append(f"Step {day}: we take {before} {sign} {amount} and get {total}.\n")
    return "".join(lines) + f"Answer: {total}"


@sgl.function
def answer(s, question, draft, threshold):
    s += sgl.user(question)
    s += sgl.assistant(parse_gen("answer", 512, draft=draft, threshold=threshold))
    counts = report(s, "answer")
    return Answer(
        text=s["answer"],
        from_tool=counts["kept_client_tokens"],
        from_draft_model=counts["kept_tokens"] - counts["kept_client_tokens"],
        from_target=counts["written_tokens"],
        target_passes=counts["target_passes"],
    )


def main(argv: Sequence[str] | None = None) -> Answer:
    parser = arguments(__doc__)
    parser.add_argument(
        "--draft", type=text_file, metavar="FILE", help="instead of the tool"
    )
    parser.add_argument(
        "--threshold", type=float, metavar="X", help="default: the server's"
    )
    args = parser.parse_args(argv)
    problem = None if args.question else embedded_problem(args)
    question = args.question or problem.prompt
    try:
        draft = args.draft or adding_tool(question)
    except ValueError as e:
        parser.error(str(e))
    print(f"The tool says:\n{draft}\n")
    state = answer.run(
        question, draft, args.threshold, temperature=0.0, backend=connect(args)
    )
    result: Answer = state.ret_value
    print(result.text)
    print(
        f"{result.from_tool} tokens of the tool's, {result.from_draft_model} of the "
        f"draft model's and {result.from_target} of the target's own, in "
        f"{result.target_passes} passes."
    )
    if problem and not check_answer(problem, result.text):
        print(
            f"This is wrong, the answer is {problem.answer}. The judge has approved of "
            "a wrong step, which is a false accept, or the target has made a mistake "
            "itself; a higher --threshold accepts less."
        )
    return result


if __name__ == "__main__":
    main()
