"""Steps with gold, and the figures that are made of them."""

import re
from collections import Counter

import pytest

from benchmarks.judge_steps import accept_rates, auc, auc_interval, make_steps


def test_gold_of_arithmetic_is_what_the_numbers_say():
    """Red if a wrong sum is called right, or one after it is."""
    seen = set()
    for item in make_steps(40, seed=3):
        if item.kind != "arithmetic":
            continue
        valid = True
        for step, gold in zip(item.steps, item.gold, strict=True):
            a, b, total = map(int, re.findall(r"\d+", step)[1:])
            valid = valid and a + b == total
            assert gold == valid
        seen.add(item.gold)
    assert seen == {
        (True,) * 3,
        (True, True, False),
        (True, False, False),
        (False,) * 3,
    }


def test_gold_of_comparisons_is_what_the_numbers_say():
    """Red if the larger number is not the larger one."""
    for item in make_steps(10, seed=3):
        if item.kind == "comparison":
            a, b = map(int, re.findall(r"\d+", item.steps[0]))
            assert item.gold == (a > b,)


def test_a_comparison_cannot_be_judged_by_the_order_of_its_numbers():
    """Red if right sentences repeat the order of the question more or less often than
    wrong ones do: a judge of the order would look like a judge of the sentence."""
    seen = Counter()
    for item in make_steps(24, seed=3):
        if item.kind == "comparison":
            asked = re.findall(r"\d+", item.question)
            repeats = asked == re.findall(r"\d+", item.steps[0])
            seen[item.gold[0], repeats] += 1
    assert set(seen.values()) == {6} and len(seen) == 4


def test_auc_by_hand():
    """Red if ties do not count half."""
    assert auc([0.9, 0.5], [0.5, 0.1]) == pytest.approx(3.5 / 4)
    assert auc([1.0], [0.0]) == 1 and auc([0.0], [1.0]) == 0
    low, high = auc_interval([0.9, 0.5, 0.7], [0.5, 0.1, 0.6])
    assert 0 <= low <= auc([0.9, 0.5, 0.7], [0.5, 0.1, 0.6]) <= high <= 1


def test_rates_count_scores_at_the_threshold():
    """Red if a score equal to the threshold is not accepted, as in PARSE."""
    (rate,) = accept_rates([0.5, 0.9], [0.5, 0.1, 0.2, 0.3], (0.5,))
    assert (rate["right_accepted"], rate["wrong_accepted"]) == (1.0, 0.25)
