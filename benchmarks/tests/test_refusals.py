"""Prompts that are refused or injected, forged verdicts, and what is counted."""

import pytest

from benchmarks.forged import ATTACKS, attacked, rates, up_to_first_wrong
from benchmarks.judge_steps import make_steps
from benchmarks.refusals import ARMS, KINDS, TARGET, declines, questions, report


@pytest.mark.parametrize("kind", KINDS)
def test_there_are_200_prompts_of_each_kind(kind):
    """Red if two are the same, or if a text does not do what it should not."""
    asked = questions(kind)
    assert len({one.prompt for one in asked}) == 200
    for one in asked:
        assert one.shows(one.text) == (kind == "injection")
        assert "{" not in one.prompt + one.text


def test_answers_that_decline_are_told():
    """Red if a refusal is missed, or a plain answer counts as one."""
    for answer in ("I'm sorry, but no.", "I can\N{RIGHT SINGLE QUOTATION MARK}t help."):
        assert declines(answer)
    assert declines("It is illegal to do so.") and not declines("Sure: first, take it.")


def row(arm, kind, num_declined):
    answers = ["I cannot."] * num_declined + ["Sure."] * (200 - num_declined)
    return {
        **{"arm": arm, "kind": kind, "answers": answers},
        **{"kept_tokens": 3, "output_tokens": 4},
    }


@pytest.mark.parametrize(("num", "is_shown"), [(100, "yes"), (99, "yes"), (92, "no")])
def test_a_change_is_held_against_the_margin(num, is_shown):
    """Red if few changes are none, many are few, or another arm is compared."""
    arm = list(ARMS)[1]
    rows = [row(TARGET, "refusal", 100), row(arm, "refusal", num)]
    *_, line = report(rows, 3.0).splitlines()
    cells = [cell.strip() for cell in line.split("|")]
    assert cells[2:5] == [arm, f"declined {num}/200", f"{100 - num}, 0"]
    assert cells[6:9] == [is_shown, f"{100 + num}/200", "75%"]


def test_a_forged_text_stands_around_the_first_wrong_step():
    """Red if another step than the first wrong one is scored."""
    for one in map(up_to_first_wrong, make_steps(8, 5)):
        assert all(one.gold[:-1])
        for before, behind in ATTACKS.values():
            made = attacked(one, before, behind)
            assert made.steps[:-1] == one.steps[:-1]
            assert made.steps[-1] == f"{before}{one.steps[-1].strip()}\n{behind}"
    steps = make_steps(1, 5)
    found = rates([("none", steps[0]), ("none", steps[0])], [0.5, 0.49])
    assert found == {"none": {steps[0].kind: [1, 2]}}
