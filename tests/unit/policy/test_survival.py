"""How long drafts last, from what was seen of them."""

import random

import pytest

from sglang_parse.policy.survival import Survival


def test_a_constant_chance_is_found():
    """Red if drafts cut off while they still agreed count as failures."""
    rng, one = random.Random(0), Survival(0.5, weight=8)
    for _ in range(2000):
        length = 0
        while rng.random() < 0.8:
            length += 1
        one.observe(min(length, 12), ended=length < 12)
    assert one.rate == pytest.approx(0.2, abs=0.02)
    assert one.survive(5) == pytest.approx(0.8**5, abs=0.03)
    assert one.mean(8) == pytest.approx(sum(0.8**k for k in range(1, 9)), abs=0.25)


def test_the_chance_may_change_with_the_length():
    """Red if drafts that either fail at once or last are taken for middling ones."""
    one = Survival(0.2)
    for _ in range(200):
        one.observe(0, ended=True)
        one.observe(100, ended=False)
    assert one.survive(1) == pytest.approx(0.5, abs=0.05)
    assert one.survive(90) > 0.3


def test_what_is_old_fades():
    """Red if drafts that got better are held for bad ones for long."""
    one = Survival(0.1, by_length=False, memory=1000)
    for _ in range(100):
        one.observe(3, ended=True)
    before = one.rate
    for _ in range(50):
        one.observe(100, ended=False)
    assert before > 0.2 and one.rate < 0.02
