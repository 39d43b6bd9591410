"""Final answers of texts, and their comparison with references."""

import pytest

from sglang_parse.calibrate.answers import (
    boxed,
    check_final,
    final_answer,
    last_number,
)


def test_boxed_takes_the_last_and_matches_braces():
    assert boxed("\\boxed{1} then \\boxed{\\frac{1}{2}} end") == "\\frac{1}{2}"
    assert boxed("none") is None and boxed("\\boxed{open") is None


@pytest.mark.parametrize(
    ("text", "gold", "right"),
    [
        ("It costs $1,250.50 in all.", "1250.5", True),
        ("First 5, then 7.", "7", True),
        ("\\boxed{12} because 3 * 4", "12", True),
        ("-3", "3", False),
        ("\\boxed{70{,}000}", "70000", True),
        ("\\boxed{70,\\!000}", "70000", True),
        ("\\boxed{1\\,080}", "1080", True),
        ("\\boxed{240 \\text{ ft}^2}", "240", True),
        ("\\boxed{240 \\mathrm{m}^{3}}", "240", True),
        ("It is 240 ft^2.", "240", True),
        ("It takes 12-15.", "15", True),
        ("\\boxed{\\frac{7}{2}}", "3.5", True),
        ("\\boxed{\\frac{7}{2}}", "72", False),
        ("\\boxed{3\\dfrac{1}{2}}", "3.5", True),
        ("\\boxed{\\frac{1}{0}}", "3", False),
        ("no number", "3", False),
    ],
)
def test_number_checker(text, gold, right):
    number = last_number(text)
    assert (number is not None and number == last_number(gold)) is right


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("Step 1\nAnswer: 12", "We get 12.\n**Answer:** 12."),
        ("\\boxed{ 1/2 }", "thus \\boxed{1/2}"),
        ("It is 3.50", "makes 3.5"),
        ("Answer: -3", "which is -3"),
        ("**Answer**: **-3.0**", "\\boxed{-3}"),
        ("\\boxed{1,000}", "Answer: $1000"),
        ("\\boxed{12\\,000}", "Final answer: 12000"),
        ("first\nYes, it is", "other words\nyes, it  is"),
    ],
)
def test_final_answers_of_two_phrasings_agree(one, other):
    assert final_answer(one) == final_answer(other) != ""
    assert final_answer("Answer: 13") != final_answer("Answer: 12")
    assert final_answer("Answer: 3") != final_answer("Answer: -3")
    assert not check_final("Answer: -3", "3") and check_final("Answer: -3", "-3.0")
