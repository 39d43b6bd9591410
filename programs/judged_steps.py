"""Multi-step reasoning, one judged step a call, steered by what became of the last one.

The draft is trusted step by step: after a step of its that the target rejected, the
next one is asked in mode `exact`, which takes only what the target itself would write.

    python -m programs.judged_steps --url http://127.0.0.1:30000
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import sglang as sgl

from programs.common import arguments, connect, embedded_problem, report, text
from sglang_parse import parse_gen


@dataclass(frozen=True)
class Step:
    """rejected: text that the target rejected here, "" if none."""

    text: str
    mode: str
    scores: tuple[float, ...]
    rejected: str


@sgl.function
def reason(s, question, threshold, max_steps=16, last="Answer"):
    """A list of steps, up to the one that starts with `last`."""
    s += sgl.user(question)
    s += sgl.assistant_begin()
    steps = []
    mode = "semantic"
    for k in range(max_steps):
        name = f"step {k}"
        s += parse_gen(name, 128, stop="\n", window=64, mode=mode, threshold=threshold)
        line = text(s, name)
        # The draft wrote ahead of this step, and that was judged as well.
        here = [x for x in report(s, name)["segments"] if x["text_start"] < len(line)]
        rejected = "".join(x["text"] for x in here if x["outcome"] == "rejected")
        scores = tuple(x["score"] for x in here if x["score"] is not None)
        steps.append(Step(line, mode, scores, rejected))
        if line.startswith(last):
            break
        s += "\n"
        mode = "exact" if rejected else "semantic"
    s += sgl.assistant_end()
    return steps


def main(argv: Sequence[str] | None = None) -> list[Step]:
    parser = arguments(__doc__)
    parser.add_argument("--threshold", type=float, default=0.8, metavar="X")
    args = parser.parse_args(argv)
    question = args.question or embedded_problem(args).prompt
    state = reason.run(question, args.threshold, temperature=0.0, backend=connect(args))
    steps: list[Step] = state.ret_value
    for step in steps:
        scores = " ".join(f"{score:.2f}" for score in step.scores)
        print(f"{step.mode:>8}  {step.text}  [{scores}]")
        if step.rejected:
            print(f"{'rejected':>8}  {step.rejected.rstrip()}")
    return steps


if __name__ == "__main__":
    main()
