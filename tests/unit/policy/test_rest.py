"""When a head stops reading, and when it reads again."""

from __future__ import annotations

from sglang_parse.policy.rest import (
    FIRST_MS,
    LONGEST_LOST_MS,
    LONGEST_MS,
    LOOK_ROUNDS,
    TIRED_ROUNDS,
    TRIAL_ROUNDS,
    WOKEN_ROUNDS,
    Pays,
    Rest,
)


def follow(rest: Rest, pays: Pays, rounds: int, *, bs: int = 1, ms: float = 0) -> None:
    for _ in range(rounds):
        rest.follow(pays, bs, ms)


def tired(ms: float = 0) -> Rest:
    """One that has begun to rest at rounds of one request."""
    rest = Rest()
    follow(rest, Pays.NO, TIRED_ROUNDS, ms=ms)
    assert rest.resting
    return rest


def test_it_rests_where_it_has_not_paid_for_long():
    """Red if one bad round, or bad ones between good ones, take the head away."""
    rest = Rest()
    for _ in range(3):
        follow(rest, Pays.NO, TIRED_ROUNDS - 1)
        follow(rest, Pays.YES, 1)
    assert not rest.resting
    follow(rest, Pays.NO, TIRED_ROUNDS - 1)
    follow(rest, Pays.TRIAL, 1)
    assert rest.resting


def test_rests_grow_and_each_ends_in_a_trial():
    """Red if a head that never pays is tried ever as often, or never again."""
    rest, ms = tired(), 0.0
    for k in range(8):
        length = min(FIRST_MS * 2**k, LONGEST_MS)
        assert not rest.is_over(1, ms + length - 1) and rest.is_over(1, ms + length)
        ms += length
        rest.wake()
        assert not rest.resting and rest.trial == TRIAL_ROUNDS
        follow(rest, Pays.TRIAL, TRIAL_ROUNDS, ms=ms)
        assert rest.resting
    rest.wake()
    follow(rest, Pays.YES, 1, ms=ms)
    assert not rest.trial
    follow(rest, Pays.NO, TIRED_ROUNDS, ms=ms)
    assert rest.is_over(1, ms + FIRST_MS)  # it has paid: rests begin anew


def test_a_dear_trial_is_rare():
    """Red if a head whose trials take long is tried as often as a cheap one, so that
    trials cost more than 1% of the time."""
    for token_ms, lost_ms, counted in (
        (10.0, 5.0, 5.0),
        (10.0, 1e6, 30.0),
        (100.0, 100.0, 100.0),  # a slow machine
    ):
        rest, length = Rest(), counted * TIRED_ROUNDS / 0.01
        for _ in range(TIRED_ROUNDS):
            rest.tried.add(1, token_ms + lost_ms, token_ms)
            rest.follow(Pays.NO, 1, 0.0)
        assert FIRST_MS < length < LONGEST_LOST_MS
        assert not rest.is_over(1, length - 1) and rest.is_over(1, length)


def test_what_an_awake_head_reads_counts_as_its_loss():
    """Red if a head that is woken between two requests reads for nothing for many
    rounds, and is woken again as if only its trial had cost anything."""
    rest = tired()
    rest.wake()
    for _ in range(50):
        rest.tried.add(32, 12.0, 10.0 / 32)
        rest.follow(Pays.NO, 32, 0.0)
    rest.tried.add(32, 20.0, 10.0 / 32, 32)
    rest.follow(Pays.LOST, 32, 0.0)
    length = (50 * 2.0 + 10.0) / 0.01
    assert not rest.is_over(32, length - 1) and rest.is_over(32, length + 1)


def test_a_kernels_first_use_does_not_count_as_a_loss():
    """Red if one round of seconds has the head rest for a minute."""
    rest = Rest()
    rest.tried.add(1, 5_000.0, 10.0)
    follow(rest, Pays.NO, TIRED_ROUNDS)
    assert rest.is_over(1, 3 * 10.0 / 0.01)


def test_a_trial_that_is_lost_early_costs_less():
    """Red if a hopeless trial goes on, or the rest behind it is as long as behind a
    whole one."""
    rest = tired()
    rest.wake()
    for _ in range(4):
        rest.tried.add(1, 100.0, 50.0, 1)
        rest.follow(Pays.TRIAL, 1, 0.0)
    rest.follow(Pays.LOST, 1, 0.0)
    assert rest.resting and not rest.trial
    length = 4 * 50.0 / 0.01
    assert FIRST_MS < length < LONGEST_MS
    assert not rest.is_over(1, length - 1) and rest.is_over(1, length)
    rest.wake()
    assert rest.tried.num == 0 and rest.trial == TRIAL_ROUNDS


def test_another_number_of_requests_is_looked_at_for_itself():
    """Red if a head that does not pay at one request is not tried at 32."""
    rest = tired()
    assert rest.is_over(32, 0.0) and not rest.is_over(1, 0.0)


def test_a_woken_head_waits_for_requests_it_can_draft_for():
    """Red if a few of many requests decide its trial, or it waits for ever."""
    rest = Rest()
    assert rest.may_ask(1, 8)
    rest = tired()
    rest.wake()
    assert not rest.may_ask(3, 8) and rest.may_ask(4, 8)
    follow(rest, Pays.NO, WOKEN_ROUNDS - 1)
    assert not rest.resting
    follow(rest, Pays.NO, 1)
    assert rest.resting and not rest.is_over(1, FIRST_MS + 1)


def test_looks_are_rare():
    """Red if ranks have to agree in every round of a rest."""
    rest = tired()
    looks = [rest.is_time_to_look() for _ in range(3 * LOOK_ROUNDS)]
    assert sum(looks) == 3
