"""Whether a head is asked, by what the rounds in which it was asked gave."""

from __future__ import annotations

from sglang_parse.policy.chains import ENOUGH_SEEN
from sglang_parse.policy.controller import WHOLE_CHAINS, Controller
from sglang_parse.policy.goodput import ENOUGH_ASKED
from sglang_parse.policy.rest import Pays, Tried

PLAIN_MS = 10.0


def controller(tokens: float, ms: float, rounds: int = ENOUGH_ASKED) -> Controller:
    """One that has seen so many rounds of a head, each with these tokens and time."""
    one = Controller()
    costs = one.costs.at(1)
    for _ in range(4):
        costs.plain.add(1, PLAIN_MS)
        costs.token_draft.add(4, 1.0)
        costs.verify.add(5, ms - 1.0)
    for _ in range(rounds):
        costs.asked.add(tokens, ms, tells_speed=False)
    return one


def test_a_head_is_asked_where_its_rounds_are_faster():
    """Red if what rounds really gave does not decide, or trials have no end."""
    assert controller(2.5, 20.0).head_pays(1, 4)
    slow = controller(1.5, 20.0)
    assert slow.head_pays(1, 4)  # the first trial is due
    assert not slow.head_pays(1, 4)
    slow.spend(2000.0)
    assert slow.head_pays(1, 4) and not slow.head_pays(1, 4)


def test_chains_are_cut_once_costs_are_known():
    """Red if unsure tokens are shown where rows are dear, or chains are never whole
    again."""
    assert controller(2.0, 20.0, rounds=1).chain_rule(1) is None
    one = controller(2.0, 20.0)
    assert one.chain_rule(1) is None  # how well the head knows itself is not known
    for _ in range(ENOUGH_SEEN):
        one.confidence.observe(0.95, right=True)
    rule = one.chain_rule(1)
    assert rule is not None
    assert rule.choose([[0.1, 0.1]]) == [0]
    assert rule.choose([[1.0, 1.0, 1.0, 1.0]]) == [4]
    assert controller(2.0, 20.0, rounds=WHOLE_CHAINS).chain_rule(1) is None


def test_a_trial_goes_on_while_it_is_asked_for():
    """Red if a trial of several rounds ends after its first."""
    slow = controller(1.5, 20.0)
    asked = [slow.head_pays(1, 4, Tried()) for _ in range(3)]
    assert asked == [Pays.TRIAL] * 3
    assert slow.head_pays(1, 4) == Pays.NO


def test_a_trial_ends_where_luck_cannot_save_it():
    """Red if a trial that cannot be won is run to its end, or a few tokens end it."""
    slow, tried = controller(1.5, 20.0), Tried()
    tried.add(1, 25.0, 10.0, 1)
    assert slow.head_pays(1, 4, tried) == Pays.TRIAL
    for _ in range(7):
        tried.add(1, 25.0, 10.0, 1)
    assert slow.head_pays(1, 4, tried) == Pays.LOST
    tried.add(12, 0.0, 10.0, 8)
    assert slow.head_pays(1, 4, tried) == Pays.TRIAL


def test_rounds_without_a_draft_end_a_trial_soon():
    """Red if a head is asked for many rounds whose chains are too unsure to be shown,
    or one such round of one request ends its trial."""
    slow, tried = controller(1.5, 20.0), Tried()
    tried.add(1, 11.0, 10.0, 0)
    assert slow.head_pays(1, 4, tried) == Pays.TRIAL
    many = Tried()
    for _ in range(2):
        many.add(16, 110.0, 100.0 / 16, 0)
    assert slow.head_pays(1, 4, many) == Pays.LOST
    others = Tried()
    for _ in range(9):
        others.add(16, 110.0, 100.0 / 16)  # nobody was asked
    assert slow.head_pays(1, 4, others) == Pays.TRIAL


def test_what_is_known_of_a_head_does_not_try_it():
    """Red if looking at a resting head counts as a trial, or what was seen too rarely
    wakes it."""
    assert controller(2.5, 20.0).head_would_pay(1, 4)
    assert not controller(2.5, 20.0, rounds=1).head_would_pay(1, 4)
    slow = controller(1.5, 20.0)
    assert not slow.head_would_pay(1, 4)
    assert slow.head_pays(1, 4) == Pays.TRIAL
