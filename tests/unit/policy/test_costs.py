"""Costs of rounds, fitted to their times."""

import random
from types import SimpleNamespace

import pytest

from sglang_parse.policy.costs import CostModel, Fit
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.round_records import Round


def drafted(costs: CostModel, steps: int, ms: float, bs: int = 1, read: int = 0):
    costs.draft.add(ms, 1, steps, steps * bs, read)


def draft_ms(costs: CostModel, steps: int, bs: int = 1, read: int = 0) -> float:
    return costs.draft.ms(1, steps, steps * bs, read)


def test_a_fit_goes_through_what_was_measured():
    """Red if the fixed part of a pass, or of a loop, is taken for one of its rows."""
    fit = Fit(1.0, 1 / 256)
    for _ in range(10):
        for work in (8, 60, 640):
            fit.add(20 + 0.1 * work, 1, work)
    for work in (8, 100, 640):
        assert fit.ms(1, work) == pytest.approx(20 + 0.1 * work, rel=0.06)


def test_a_kernels_first_use_is_forgotten():
    """Red if seconds of compilation decide how later rounds run."""
    fit = Fit(1.0, 1 / 256)
    for rows, ms in ((28, 3600.0), (5, 7100.0), (4, 6000.0), (100, 20.0), (64, 900.0)):
        fit.add(ms, 1, rows)
    for _ in range(4):
        fit.add(20.0, 1, 64)
    assert all(fit.ms(1, rows) <= 26.0 for rows in (4, 8, 28, 60, 100))


def test_what_times_do_not_tell_apart_is_guessed():
    """Red if a draft of four tokens is taken to cost half of the long ones that were
    timed; or if short passes look too dear to try, or as cheap as nothing."""
    costs = CostModel()
    for _ in range(3):
        drafted(costs, 128, 300.0)
        costs.verify.add(60.0, 1, 400, 8)
    assert draft_ms(costs, 4) < 30.0
    assert draft_ms(costs, 256) == pytest.approx(600.0, rel=0.02)
    assert 15.0 < costs.verify.ms(1, 8, 8) < 40.0


def test_another_number_of_requests_is_known_before_it_was_seen():
    """Red if a server that has timed one and eight requests knows nothing of 24, or
    forgets what one request costs while it serves many."""
    costs = CostModel()

    def serve(bs: int) -> None:
        for steps in (16, 64):
            drafted(costs, steps, steps * (1 + 0.1 * bs), bs)
            costs.verify.add(20 + 0.1 * steps * bs, 1, steps * bs, bs)
            costs.plain.add(10 + 0.2 * bs, 1, bs)

    for _ in range(10):
        serve(1)
        serve(8)
    seen = costs.at(24)
    assert seen.step == pytest.approx(3.4, rel=0.1)
    assert seen.plain == pytest.approx(14.8, rel=0.1)
    for _ in range(10):
        serve(8)
    assert costs.at(1).step == pytest.approx(1.1, rel=0.3)


def test_a_plain_step_is_known_once_it_was_seen_twice():
    """Red if plain decoding is given up for good for its first, slow round."""
    costs = CostModel()
    costs.plain.add(500.0, 1, 1)
    assert not costs.knows_plain(1)
    for _ in range(2):
        costs.plain.add(20.0, 1, 1)
    assert costs.at(1).plain == pytest.approx(20.0, rel=0.1)


def test_a_request_may_wait_as_long_as_its_pass_saves():
    """Red if passes begin for every request whose draft is complete where a pass is
    dear, or wait for all where steps are."""

    def most(step_ms, pass_ms, bs=8):
        costs = CostModel()
        for _ in range(8):
            for x in (8, 32, 128):
                drafted(costs, x, step_ms * x, bs)
                costs.verify.add(pass_ms, 1, x, bs)
        return costs.at(bs).most_idle_steps

    assert most(2.0, 20.0) < most(2.0, 40.0) and most(2.0, 40.0) > most(4.0, 40.0)
    assert most(2.0, 40.0, 16) == pytest.approx(2 * most(2.0, 40.0), rel=0.1)


def test_a_machine_that_was_busy_does_not_spoil_drafts_for_long():
    """Red if drafts that were timed beside a busy neighbour stay dear after it left."""
    costs = CostModel()
    for slower, steps in ((3.0, 24), (3.0, 96), (1.0, 24)):
        for _ in range(12):
            drafted(costs, steps, slower * steps)
    assert draft_ms(costs, 24) == pytest.approx(24, rel=0.3)
    assert draft_ms(costs, 96) < 1.6 * 96


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("windows", [(8, 12, 16, 32), (16,)])
def test_drafts_are_timed_where_every_round_reads_prompts(seed, windows):
    """Red if prompts count as slow drafting, or if nothing is learnt beside them: at
    many requests with short answers no round is without one."""
    costs, rng = CostModel(), random.Random(seed)
    for k in range(40):
        steps = rng.choice(windows)
        read = 1600 if k == 0 else 50 * rng.randrange(1, 12)
        ms = (2.0 * steps + 0.04 * read) * rng.lognormvariate(0, 0.05)
        drafted(costs, steps, ms, 32, read)
    for steps in windows:
        assert draft_ms(costs, steps, 32) == pytest.approx(2.0 * steps, rel=0.15)
    more = draft_ms(costs, 16, 32, 1000) - draft_ms(costs, 16, 32)
    assert more == pytest.approx(40.0, rel=0.25)


def test_rounds_that_mostly_read_say_little_of_steps():
    """Red if a draft that is tried seldom, and then reads thousands of tokens, looks
    dearer with each trial: what they take is never known exactly."""
    costs, rng = CostModel(), random.Random(0)
    for k in range(60):
        read = rng.randrange(500) if k < 40 else rng.randrange(6000, 9000)
        ms = 30.0 + 0.13 * read * rng.uniform(0.9, 1.1)
        drafted(costs, 4, ms, 8, read)
    assert draft_ms(costs, 4, 8) == pytest.approx(30.0, rel=0.25)


def test_a_token_or_two_tell_nothing_of_what_prompts_cost():
    """Red if noise of rounds that read next to nothing becomes a price of prompts."""
    costs, rng = CostModel(), random.Random(1)
    for _ in range(200):
        ms = 32.0 * rng.lognormvariate(0, 0.1)
        steps, read = rng.choice((12, 16)), rng.randrange(3)
        request = SimpleNamespace(draft=Draft())
        seconds = {"draft": ms / 1000, "verify": 0.02}
        round = Round(None, [request], num_running=8, num_rows=9, seconds=seconds)
        round.num_draft_steps, round.num_read = steps, read
        costs.learn(round)
    assert draft_ms(costs, 16, 8, 800) - draft_ms(costs, 16, 8) < 100.0


def test_before_drafts_are_timed_they_are_compared_with_plain_steps():
    """Red if a draft of which nothing is known looks a hundred times as fast as a
    target whose steps take long, or slower than one whose steps are short."""
    costs = CostModel()
    assert costs.at(1).step == pytest.approx(1.0, rel=0.01)
    costs.plain.add(60.0, 1, 1)
    assert costs.at(1).step == pytest.approx(5.0, rel=0.01)
    assert costs.at(1).pass_ms(1) == pytest.approx(65.0, rel=0.02)
