"""Two tensor-parallel ranks over gloo, with adaptive windows; passes take the route
`rows` on SGLang's own torch attention, and decode steps run on another backend.

One server for all: ranks that decide differently wait for each other for ever, and a
prefix that is shown other columns gets other verdicts.
"""

import time

import pytest

from tests.support.client import Server, report

# Servers of several tests at a time on two cores: a few prompts say enough.
NUM_PROMPTS = 5
CASES = {
    "exact": {"parse_mode": "exact"},
    "nothing valid": {"parse_threshold": 1.5},
    "off": {"parse_mode": "off"},
}


def answers(server: Server, prompts) -> dict[str, list]:
    return {
        name: [
            r["output_ids"]
            for r in server.generate_all(
                prompts[:NUM_PROMPTS], 4, custom=custom, max_new_tokens=32
            )
        ]
        for name, custom in CASES.items()
    }


@pytest.mark.combines("tensor parallelism", "head")
def test_two_ranks_answer_like_one(pool, prompts):
    """Red if ranks follow their own clocks or verdicts: tokens differ, or all hangs."""
    one = answers(pool.get("parse"), prompts)
    ranks = pool.get("ranks")
    assert answers(ranks, prompts) == one

    # Where segments are kept, windows and verdicts of both ranks must agree as well.
    # Without the exact tail no draft of the model is merely followed; on a loaded
    # machine rounds may still go without any, 1024 at most, so it is asked again.
    custom = {"parse_exact_tail": False, "parse_compose": False}
    kept = 0
    for _ in range(12):
        judged = ranks.generate_all(prompts[:NUM_PROMPTS], 4, custom=custom)
        kept += sum(report(r)["kept_tokens"] for r in judged)
        if kept > NUM_PROMPTS:
            break
    assert kept > NUM_PROMPTS
    assert ranks.is_alive()


def test_verdicts_that_do_not_pay_are_left_out(pool, prompts):
    """Red if the worker asks for verdicts in a round that was planned without them, or
    one rank does and the other does not (all hangs).

    A judge's question of hundreds of tokens costs far more than any verdict gives.
    """
    ranks = pool.get("ranks")
    custom = {"parse_judge_suffix": "Is it right? " * 80, "parse_compose": False}
    reports = []
    deadline = time.monotonic() + 200  # a trial that was held up comes again late
    while not (reports and followed(reports[-1])):
        if len(reports) >= 30 and time.monotonic() > deadline:
            break
        prompt = prompts[len(reports) % len(prompts)]
        reports.append(report(ranks.generate(prompt, custom=custom)))
    assert followed(reports[-1]), reports[-1]


def followed(entry) -> bool:
    """Whether a whole answer was drafted and none of it judged."""
    drafted = entry["draft_tokens"] > 30 and not entry["eagle_draft_tokens"]
    return drafted and entry["judged_segments"] == 0
