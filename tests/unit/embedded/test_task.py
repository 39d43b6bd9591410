import pytest

from benchmarks.embedded_answers import (
    PHRASINGS,
    first_error,
    render_answer,
    render_step,
    split_segments,
)
from sglang_parse.embedded.task import Problem, check_answer, is_held_out, make_problems

PROBLEM = Problem("Tom", "coins", 7, (("finds", 5), ("loses", 3), ("wins", 6)))


def test_problems_deterministic_and_splits_disjoint():
    assert make_problems(20, 3) == make_problems(20, 3)
    assert all(is_held_out(p) for p in make_problems(50, 3))
    assert not any(is_held_out(p) for p in make_problems(50, 3, "train"))
    with pytest.raises(ValueError, match="split"):
        make_problems(1, 0, "test")


def test_prompt_and_answer():
    assert PROBLEM.answer == 15
    assert PROBLEM.prompt == (
        "Tom has 7 coins. Day 1: finds 5. Day 2: loses 3. Day 3: wins 6."
        " How many coins does Tom have now?"
    )


@pytest.mark.parametrize("phrasing", PHRASINGS)
def test_every_phrasing_accepted_in_full_and_as_prefix(phrasing):
    text = render_answer(PROBLEM, [phrasing] * 3)
    assert check_answer(PROBLEM, text)
    segments = split_segments(text)
    assert "".join(segments) == text and len(segments) == 4
    for k in range(5):
        assert first_error(PROBLEM, "".join(segments[:k])) is None


@pytest.mark.parametrize("phrasing", PHRASINGS)
@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize(
    "wrong",
    [{"total": 1}, {"amount": 8}, {"prev": 2}, {"i": 4}, {"flip": True}],
    ids=lambda wrong: next(iter(wrong)),
)
def test_injected_error_found_at_its_step(phrasing, step, wrong):
    if "flip" in wrong:
        gain = PROBLEM.events[step - 1][0] in ("finds", "wins")
        wrong = {"verb": "loses" if gain else "finds"}
    lines = [render_step(PROBLEM, i, phrasing) for i in (1, 2, 3)]
    lines[step - 1] = render_step(PROBLEM, step, phrasing, **wrong)
    text = "".join(lines) + "Answer: 15"
    assert first_error(PROBLEM, text) == step - 1
    assert first_error(PROBLEM, "".join(lines[: step - 1])) is None


def test_skipped_repeated_truncated_and_trailing_segments():
    one, two, three = (render_step(PROBLEM, i, "A1") for i in (1, 2, 3))
    assert first_error(PROBLEM, one + three) == 1
    assert first_error(PROBLEM, one + one) == 1
    assert first_error(PROBLEM, one + two[:-4]) == 1
    assert first_error(PROBLEM, one + two + "Answer: 15") == 2
    assert first_error(PROBLEM, one + two + three + "Answer: 15\nStep 4:") == 3


def test_wrong_answer_line():
    text = render_answer(PROBLEM, "B").replace("Answer: 15", "Answer: 14")
    assert not check_answer(PROBLEM, text)
    assert first_error(PROBLEM, text) == 3
    assert not check_answer(PROBLEM, text.rsplit("Answer", 1)[0])
