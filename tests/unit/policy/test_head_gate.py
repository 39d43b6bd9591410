"""When a head drafts where nobody else does, and when it rests."""

from sglang_parse.policy.costs import CostModel
from sglang_parse.policy.gate import WHOLE_CHAINS, Gate
from sglang_parse.policy.head_gate import (
    IDLE_ROUNDS,
    LOOK_ROUNDS,
    TRIAL_ROUNDS,
    HeadGate,
)

PLAIN_MS = 10.0


def tried(
    tokens: float, ms: float, rounds: int = TRIAL_ROUNDS, bs: int = 1
) -> HeadGate:
    """One that has seen so many rounds of a head, each with these tokens and time."""
    one = HeadGate()
    for _ in range(rounds):
        one.learn(bs, tokens, ms, plain_ms=PLAIN_MS, now_ms=0.0)
    return one


def asks(one: HeadGate, now_ms: float = 0.0, num_able: int = 1, bs: int = 1) -> bool:
    rate = bs / PLAIN_MS
    return one.asks(bs, num_able, rate, now_ms)


def follow(one: HeadGate, answer: bool, rounds: int) -> None:
    for _ in range(rounds):
        one.follow(1, answer, plain_ms=PLAIN_MS, now_ms=0.0)


def test_a_head_is_asked_where_its_rounds_are_faster():
    """Red if what rounds really gave does not decide."""
    assert asks(tried(2.5, 20.0)) is True
    assert tried(2.5, 20.0).rate(1) == 2.5 / 20
    assert asks(tried(1.9, 20.0)) is False
    assert asks(HeadGate()) is True  # nothing is known


def test_a_trial_goes_on_to_its_end_and_is_charged():
    """Red if a trial ends after its first round, or what it lost does not keep the next
    one away for a hundred times as long."""
    one = tried(1.5, 20.0, TRIAL_ROUNDS - 1)
    assert asks(one) is True
    one.learn(1, 1.5, 20.0, plain_ms=PLAIN_MS, now_ms=0.0)
    wait_ms = 100 * 5.0 * TRIAL_ROUNDS
    assert asks(one, wait_ms - 1) is False and asks(one, wait_ms) is True
    assert asks(one) is True  # the new trial goes on


def test_a_trial_ends_where_luck_cannot_save_it():
    """Red if a hopeless trial goes on, or if a few tokens end one."""
    assert asks(tried(1, 60.0, 1)) is False
    assert asks(tried(1, 20.0, 3)) is True
    assert asks(tried(1, 20.0, 6)) is False


def test_a_kernels_first_use_is_not_a_loss_of_minutes():
    """Red if one round of seconds keeps a head away for minutes."""
    one = tried(1, 5_000.0, 1)
    assert asks(one, 100 * 3 * PLAIN_MS) is True


def test_a_few_of_many_requests_do_not_decide_a_trial():
    """Red if a head that can draft for few of the running requests is measured."""
    assert asks(HeadGate(), num_able=3, bs=8) is False
    assert asks(HeadGate(), num_able=4, bs=8) is True


def test_another_number_of_requests_is_measured_for_itself():
    """Red if a head that does not pay at one request is not tried at 32."""
    one = tried(1.5, 20.0)
    assert asks(one) is False and asks(one, num_able=32, bs=32) is True


def test_it_rests_where_it_has_not_paid_for_long():
    """Red if a head that is not asked reads on, or if bad rounds between good ones take
    it away; or if it wakes again at once."""
    one = tried(1.5, 20.0)
    for _ in range(3):
        follow(one, False, IDLE_ROUNDS - 1)
        follow(one, True, 1)
    assert not one.rests
    follow(one, False, IDLE_ROUNDS)
    assert one.rests and not one.may_ask(1, 1 / PLAIN_MS, 1000.0)
    looks = [one.is_time_to_look() for _ in range(3 * LOOK_ROUNDS)]
    assert sum(looks) == 3
    one.wake()
    follow(one, False, IDLE_ROUNDS - 1)
    assert not one.rests


def test_chains_are_cut_once_a_trial_is_over():
    """Red if unsure tokens are shown where rows are dear, or chains are never whole
    again."""
    gate = Gate()
    costs = gate.costs = CostModel()
    for _ in range(4):
        costs.at(1).plain.add(PLAIN_MS)
        for rows in (2, 5, 40):
            costs.at(1).verify.add(rows, 10.0 + rows)
    gate.head = tried(2.0, 15.0, TRIAL_ROUNDS - 1)
    assert gate.chain_rule(1) is None
    gate.head = tried(2.0, 15.0)
    rule = gate.chain_rule(1)
    assert rule is not None
    shown = rule.choose([[0.1, 0.1]]), rule.choose([[1.0, 1.0, 1.0, 1.0]])
    assert shown == ([0], [4])
    gate.head = tried(2.0, 15.0, WHOLE_CHAINS)
    assert gate.chain_rule(1) is None
