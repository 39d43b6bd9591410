"""How long drafts last, from what was seen of them."""

import random

import pytest

from sglang_parse.policy.acceptance import Acceptance, Rate


def geometric(rng: random.Random, chance: float, most: int) -> tuple[int, int]:
    """Tokens of a draft that were looked at, and whether one of them ended it."""
    for num in range(most):
        if rng.random() < chance:
            return num + 1, 1
    return most, 0


def test_a_constant_chance_is_found():
    """Red if drafts cut off while they still agreed count as failures."""
    rng, one = random.Random(0), Rate(0.5, weight=8)
    for _ in range(2000):
        one.observe(*geometric(rng, 0.2, 12))
    assert one.value == pytest.approx(0.2, abs=0.02)
    assert one.mean(8) == pytest.approx(sum(0.8**k for k in range(1, 9)), abs=0.25)
    assert one.mean(0) == 0


def test_what_is_old_fades():
    """Red if drafts that got a little better are held for bad ones for long."""
    one = Rate(0.1, weight=8, memory=1000)
    for _ in range(40):
        one.observe(20, 1)
    for _ in range(80):
        one.observe(50, 1)
    assert one.value == pytest.approx(0.02, rel=0.2)


def test_a_run_of_early_ends_outweighs_what_came_before():
    """Red if two dozen drafts that fail at once are lost among thousands of tokens."""
    one = Rate(0.1, weight=32)
    for _ in range(500):
        one.observe(8, 0)
    assert one.mean(8) > 6
    for _ in range(24):
        one.observe(1, 1)
    assert one.mean(8) < 2 and one.num_ends <= 24


def test_a_few_that_last_outweigh_many_that_failed():
    """Red if drafts that got better are taken for bad ones while they are seldom tried,
    a few tokens at a time."""
    one = Rate(0.2, weight=16)
    for _ in range(60):
        one.observe(1, 1)
    assert one.value > 0.8
    for _ in range(12):
        one.observe(4, 0)
    assert one.value < 0.2 and one.num_ends == 0


def test_nothing_is_forgotten_while_nothing_changes():
    """Red if bad luck, as it comes with any chance, throws away what was seen."""
    least = []
    for seed in range(20):
        rng, one = random.Random(seed), Rate(0.2, weight=32)
        seen = []
        for _ in range(2000):
            one.observe(*geometric(rng, 0.2, 8))
            seen.append(one.num_seen)
        least.append(min(seen[1000:]))
    assert sorted(least)[2] > 1500


def test_drafts_are_as_long_as_answers_let_them():
    """Red if a window longer than the answers is taken to be filled."""
    one = Acceptance()
    one.ended.observe(4000, 50)  # answers of 80 tokens
    assert one.drafted(8) == pytest.approx(8, rel=0.1)
    assert one.drafted(1000) == pytest.approx(80, rel=0.1)
