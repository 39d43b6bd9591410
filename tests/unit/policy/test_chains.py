"""Where chains of a head are cut."""

from __future__ import annotations

import itertools
import math
import random
from types import SimpleNamespace

import pytest

from sglang_parse.judging.decide import Decision
from sglang_parse.policy import chains
from sglang_parse.policy.chains import OPINION, ChainRule, Confidence
from sglang_parse.policy.learn import learn_siblings
from sglang_parse.policy.round_costs import RoundCosts
from sglang_parse.policy.survival import Survival
from sglang_parse.requests.draft import Shown, Sibling


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


def gain(rule: ChainRule, chances, shown, others=()) -> float:
    """Tokens expected of what is shown, less what its time is worth."""
    tokens, rows = 0.0, 0
    for i, (one, num) in enumerate(zip(chances, shown, strict=True)):
        stand = [
            math.prod(map(rule.confidence.of, one[:k])) for k in range(num.length + 1)
        ]
        tokens += sum(stand[1:])
        tokens += sum(
            min(stand[at + 1], stand[at] * rule.siblings.of(others[i][at][k]))
            for at, k in num.others
        )
        rows += num.length + len(num.others)
    ms = rule.costs.verify.ms(rule.bs + rows) - rule.plain_ms
    return tokens - rule.rate * ms if rows else 0.0


def lengths(rule: ChainRule, chances) -> list[int]:
    return [one.length for one in rule.choose(chances)]


@pytest.mark.parametrize("row_ms", [0.1, 1.0, 4.0])
@pytest.mark.parametrize("seed", range(6))
def test_no_other_lengths_give_more(row_ms, seed):
    """Red if any choice of lengths, all of them tried, outweighs the one made."""
    rng = random.Random(seed)
    rule = rule_of(3, row_ms)
    chances = [[rng.random() for _ in range(rng.randint(0, 4))] for _ in range(3)]
    chosen = gain(rule, chances, rule.choose(chances))
    every = itertools.product(*(range(len(one) + 1) for one in chances))
    best = max(gain(rule, chances, list(map(Shown, one))) for one in every)
    assert chosen == pytest.approx(best)


@pytest.mark.parametrize("row_ms", [0.1, 0.5, 2.0])
@pytest.mark.parametrize("seed", range(6))
def test_no_other_siblings_give_more(monkeypatch, row_ms, seed):
    """Red if any choice of lengths and siblings, all of them tried, outweighs the one
    made, or a sibling is shown in a place where the chain is not."""
    rng = random.Random(seed)
    rule = rule_of(2, row_ms)
    chances = [[rng.random() for _ in range(2)] for _ in range(2)]
    others = [[[rng.random() * (1 - p) for _ in range(2)] for p in c] for c in chances]
    monkeypatch.setattr(chains, "LEAST_CHANCE", 0.0)
    shown = rule.choose(chances, others)
    assert all(at < one.length for one in shown for at, _ in one.others)
    every = itertools.product(
        *(list(whole_choices(c, o)) for c, o in zip(chances, others, strict=True))
    )
    best = max(gain(rule, chances, one, others) for one in every)
    assert gain(rule, chances, shown, others) == pytest.approx(best)


def whole_choices(chain, others):
    """Every length, with every set of the others in its places."""
    for num in range(len(chain) + 1):
        places = [(at, k) for at in range(num) for k in range(len(others[at]))]
        for size in range(len(places) + 1):
            for some in itertools.combinations(places, size):
                yield Shown(num, some)


def test_siblings_are_shown_where_rows_are_free():
    """Red if a sibling stands in another place, or is shown whatever its row costs."""
    chances, others = [[0.6, 0.5]], [[[0.3, 0.1], [0.4]]]
    (one,) = rule_of(1, 0.0).choose(chances, others)
    assert one.length == 2 and set(one.others) == {(0, 0), (0, 1), (1, 0)}
    (one,) = rule_of(1, 2.5, pass_ms=10.0).choose(chances, others)
    assert one.length == 2 and set(one.others) == {(0, 0), (1, 0)}
    assert rule_of(1, 20.0).choose(chances, others) == [Shown(0)]


def test_free_rows_are_all_shown_and_dear_ones_are_not():
    """Red if the price of a row does not count, or a sure token is not shown where it
    pays: one of 0.9 in twice the time of a plain round does not."""
    chances = [[0.9, 0.9, 0.9], [0.3, 0.2]]
    assert lengths(rule_of(2, 0.0), chances) == [3, 2]
    assert lengths(rule_of(2, 20.0, pass_ms=0.0), chances) == [0, 0]
    assert lengths(rule_of(2, 1.0), [[0.9, 0.9, 0.9], [0.05, 0.9]]) == [3, 0]


def test_the_better_rounds_are_the_dearer_is_a_row():
    """Red if rows are paid at the price of plain rounds where drafts do far better."""
    assert lengths(rule_of(1, 1.0), [[0.2]]) == [1]
    assert lengths(rule_of(1, 1.0, rate=0.5), [[0.2]]) == [0]


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


def test_what_stands_beside_a_chain_is_learnt_unseen_too():
    """Red if a head whose other tokens are never shown is never found to be right, or
    if places count that the target did not reach."""
    confidence = Confidence()
    others = [(Sibling(at, token), 0.25) for at, token in ((0, 9), (1, 7), (2, 8))]
    r = SimpleNamespace(
        error=None,
        cut=SimpleNamespace(tail_end=3),
        decision=Decision((1, 7, 30), 0, 1, ()),  # the last stands behind a sibling
        others=others,
    )
    learn_siblings(confidence, r)
    expected = (1 + OPINION * 0.25) / (2 + OPINION)
    assert confidence.of(0.25) == pytest.approx(expected)
