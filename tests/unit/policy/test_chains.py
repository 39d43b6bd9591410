"""Where chains of a head are cut."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from sglang_parse.policy.chains import OPINION, ChainRule, Confidence
from sglang_parse.policy.round_costs import RoundCosts
from sglang_parse.policy.survival import Survival


def costs_of(row_ms: float, *, pass_ms: float = 10.0, step_ms: float = 0.0):
    """A pass takes `pass_ms` and `row_ms` for each of its rows."""
    costs = RoundCosts()
    for rows in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64):
        costs.verify.add(rows, pass_ms + row_ms * rows)
    for steps in (1, 2, 4, 8):
        costs.token_draft.add(steps, max(1e-9, step_ms * steps))
    return costs


def rule_of(bs: int, row_ms: float, *, rate: float | None = None, **more) -> ChainRule:
    costs = costs_of(row_ms, **more)
    plain_ms = costs.verify.ms(bs)
    rate = bs / plain_ms if rate is None else rate
    agreement = Survival(0.2, weight=16)
    return ChainRule(bs, costs, plain_ms, rate, Confidence(), agreement)


def gain(rule: ChainRule, chances, lens) -> float:
    """Tokens expected of what is shown, less what its time is worth."""
    tokens = sum(
        math.prod(map(rule.confidence.of, one[: k + 1]))
        for one, num in zip(chances, lens, strict=True)
        for k in range(num)
    )
    rows = sum(lens)
    ms = rule.costs.verify.ms(rule.bs + rows) - rule.plain_ms
    return tokens - rule.rate * ms if rows else 0.0


@pytest.mark.parametrize("row_ms", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(6))
def test_no_other_lengths_give_more(row_ms, seed):
    """Red if any choice of lengths, all of them tried, outweighs the one made."""
    rng = random.Random(seed)
    rule = rule_of(3, row_ms)
    chances = [[rng.random() for _ in range(rng.randint(0, 4))] for _ in range(3)]
    chosen = gain(rule, chances, rule.choose(chances))
    every = itertools.product(*(range(len(one) + 1) for one in chances))
    best = max(gain(rule, chances, one) for one in every)
    assert chosen == pytest.approx(best)


def test_free_rows_are_all_shown_and_dear_ones_are_not():
    """Red if the price of a row does not count, or a sure token is not shown where it
    pays: one of 0.9 in twice the time of a plain round does not."""
    chances = [[0.9, 0.9, 0.9], [0.3, 0.2]]
    assert rule_of(2, 0.0).choose(chances) == [3, 2]
    assert rule_of(2, 20.0, pass_ms=0.0).choose(chances) == [0, 0]
    assert rule_of(2, 1.0).choose([[0.9, 0.9, 0.9], [0.05, 0.9]]) == [3, 0]


def test_the_better_rounds_are_the_dearer_is_a_row():
    """Red if rows are paid at the price of plain rounds where drafts do far better."""
    assert rule_of(1, 1.0).choose([[0.2]]) == [1]
    assert rule_of(1, 1.0, rate=0.5).choose([[0.2]]) == [0]


def test_steps_that_do_not_pay_are_not_run():
    """Red if an unsure first token, or steps that cost more than they bring, start a
    chain."""
    assert rule_of(2, 0.5).starts([0.9, 0.01], 4) == [True, False]
    assert rule_of(2, 0.5, step_ms=20.0).starts([0.9, 0.9], 4) == [False, False]


def test_an_opinion_counts_until_more_is_seen():
    """Red if a head that is too sure of itself is believed for good."""
    confidence = Confidence()
    assert confidence.of(0.95) == pytest.approx(0.95)
    for k in range(400):
        confidence.observe(0.95, right=k % 2 == 0)
    expected = (200 + OPINION * 0.95) / (400 + OPINION)
    assert confidence.of(0.95) == pytest.approx(expected)
    assert confidence.of(0.45) == pytest.approx(0.45)
    for _ in range(1000):
        confidence.observe(0.95, right=True)
    assert confidence.of(0.95) > 0.85
