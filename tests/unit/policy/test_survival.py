"""How long drafts last, from what was seen of them."""

import random

import pytest

from sglang_parse.policy.survival import STARTS, Survival


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
    assert one.survive(1) == pytest.approx(0.5, abs=0.06)
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


@pytest.mark.parametrize("by_length", [True, False])
def test_a_run_of_early_ends_outweighs_what_came_before(by_length):
    """Red if twenty drafts that fail at once are lost among thousands of tokens."""
    one = Survival(0.1, by_length=by_length)
    for _ in range(500):
        one.observe(8, ended=False)
    assert one.mean(8) > 6
    for _ in range(20):
        one.observe(0, ended=True)
    assert one.mean(8) < 2
    assert one.num_ends == 20


def test_a_few_that_last_outweigh_many_that_failed():
    """Red if drafts that got better are taken for bad ones while they are seldom tried,
    a few tokens at a time."""
    one = Survival(0.2)
    for _ in range(60):
        one.observe(0, ended=True)
    assert one.survive(1) < 0.1
    for _ in range(5):
        one.observe(4, ended=False)
    assert one.survive(1) > 0.8
    assert one.num_ends == 0


def test_nothing_is_forgotten_while_nothing_changes():
    """Red if bad luck, as it comes with any chance, throws away what was seen."""
    least = []
    for seed in range(20):
        rng, one = random.Random(seed), Survival(0.2)
        for k in range(2000):
            length = 0
            while length < 8 and rng.random() < 0.8:
                length += 1
            one.observe(length, ended=length < 8)
            if k == 999:
                least.append(one.num_seen)
            if k > 999:
                least[-1] = min(least[-1], one.num_seen)
    assert sorted(least)[2] > 1500


def test_drafts_that_end_at_once_have_no_length():
    """Red if a draft without a token counts as seen, or if its end is lost."""
    one = Survival(0.1, by_length=False)
    one.observe(0, ended=False)
    assert one.num_seen == one.num_ends == 0
    one.observe(0, ended=True)
    assert (one.num_seen, one.num_ends) == (1, 1)


@pytest.mark.parametrize("by_length", [True, False])
def test_lengths_are_summed_token_by_token(by_length):
    """Red if a length inside a bin, or at its edge, is summed by another bin."""
    rng, one = random.Random(4), Survival(0.1, by_length=by_length)
    for _ in range(400):
        one.observe(rng.choice([0, 0, 1, 5, 9, 30, 90]), ended=rng.random() < 0.7)
    edges = [*STARTS, 1 << 30]
    reached, mean = 1.0, 0.0
    for num in range(1, 300):
        k = next(i for i, edge in enumerate(edges) if edge >= num) - 1
        reached *= 1 - one._chance(k)
        mean += reached
        assert one.survive(num) == pytest.approx(reached)
        assert one.mean(num) == pytest.approx(mean)
    assert (one.survive(0), one.mean(0)) == (1.0, 0.0)
