"""Costs of rounds, fitted to their times."""

import random

import pytest

from sglang_parse.policy.costs import CostModel, Line, Mean


@pytest.mark.parametrize("is_loop", [True, False])
def test_a_line_goes_through_what_was_measured(is_loop):
    """Red if the fixed part of a pass, or of a loop, is taken for one of its rows."""
    line = Line(is_loop=is_loop)
    for _ in range(10):
        for work in (8, 60, 640):
            line.add(work, 20 + 0.1 * work)
    for work in (8, 100, 640):
        assert line.ms(work) == pytest.approx(20 + 0.1 * work, rel=0.06)


def test_a_kernels_first_use_is_forgotten():
    """Red if seconds of compilation decide how later rounds run."""
    line, mean = Line(is_loop=False), Mean()
    for one in (lambda ms: line.add(64, ms), mean.add):
        for ms in (3000.0, 20.0, 20.0, 900.0):
            one(ms)
    assert line.ms(64) < 25.0 and mean.ms < 30.0
    line = Line(is_loop=False)
    for rows, ms in ((28, 3600.0), (5, 7100.0), (4, 6000.0), (100, 20.0)):
        line.add(rows, ms)
    assert all(line.ms(rows) <= 21.0 for rows in (4, 8, 28, 60, 100))


def test_a_short_draft_that_was_never_timed_looks_short():
    """Red if plain rounds rewrite what failed for good, because a draft of four tokens
    is taken to cost half of the long ones that were timed."""
    draft = CostModel().at(1).draft
    for _ in range(3):
        draft.add(128, 300.0)
    assert draft.ms(4) < 30.0 and draft.ms(256) == pytest.approx(600.0, rel=0.01)


def test_a_pass_of_few_rows_looks_as_cheap_as_a_plain_round():
    """Red if windows that are shorter than all that were tried look too dear to try, or
    as cheap as nothing."""
    own = CostModel().at(32)
    for _ in range(4):
        own.verify.add(400, 60.0)
    assert own.verify.ms(216) == pytest.approx(46.2, abs=0.5)  # half is fixed
    for _ in range(4):
        own.plain.add(20.0)
    own.verify.add(400, 60.0)
    assert own.verify.ms(216) == pytest.approx(40.0, rel=0.02)
    assert own.verify.ms(8) >= 15.0


def test_a_first_plain_round_concludes_nothing():
    """Red if plain decoding is given up for good for its first, slow round."""
    costs = CostModel()
    for _ in range(3):
        costs.at(1).draft.add(16, 16.0)
        costs.at(1).verify.add(40, 20.0)
    costs.at(1).plain.add(2000.0)
    assert costs.plain_ms(1) <= 20.0
    for _ in range(2):
        costs.at(1).plain.add(12.0)
    assert costs.plain_ms(1) == pytest.approx(12.0)


def test_a_plain_step_is_known_once_it_was_seen_twice():
    """Red if nothing is known of a step until two plain rounds were seen, or if a first
    use of a kernel is believed."""
    costs = CostModel()
    own = costs.at(1)
    assert costs.step_ms(1) == 0.0
    for _ in range(3):
        own.draft.add(16, 16.0)
        own.verify.add(1, 30.0)
    assert costs.step_ms(1) == pytest.approx(30.0)
    own.plain.add(500.0)
    assert costs.step_ms(1) == pytest.approx(30.0)
    for _ in range(2):
        own.plain.add(20.0)
    assert costs.step_ms(1) == costs.plain_ms(1) == pytest.approx(20.0)


def test_a_request_may_wait_as_long_as_its_pass_saves():
    """Red if passes begin for every request whose draft is complete where a pass is
    dear, or wait for all where steps are."""

    def most(step_ms, pass_ms, bs=8):
        own = CostModel().at(bs)
        for _ in range(8):
            for x in (8, 32, 128):
                own.draft.add(x, step_ms * x)
                own.verify.add(x, pass_ms)
        return own.most_idle_steps

    assert most(2.0, 20.0) < most(2.0, 40.0) and most(2.0, 40.0) > most(4.0, 40.0)
    assert most(2.0, 40.0, 16) == pytest.approx(2 * most(2.0, 40.0), rel=0.05)


def test_a_machine_that_was_busy_does_not_spoil_drafts_for_long():
    """Red if drafts that were timed beside a busy neighbour stay dear after it left."""
    own = CostModel().at(1)
    for slower, steps in ((3.0, 24), (3.0, 96), (1.0, 24)):
        for _ in range(12):
            own.draft.add(steps, slower * steps)
            own.verify.add(2 * steps, slower * (20 + 0.2 * steps))
    assert own.draft.ms(24) == pytest.approx(24, rel=0.25)
    assert own.draft.ms(96) < 1.6 * 96


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("windows", [(8, 12, 16, 32), (16,)])
def test_drafts_are_timed_where_every_round_reads_prompts(seed, windows):
    """Red if prompts count as slow drafting, or if nothing is learnt beside them: at
    many requests with short answers no round is without one."""
    own, rng = CostModel().at(32), random.Random(seed)
    for k in range(40):
        steps = rng.choice(windows)
        num_read = 1600 if k == 0 else 50 * rng.randrange(1, 12)
        ms = (2.0 * steps + 0.04 * num_read) * rng.lognormvariate(0, 0.05)
        own.draft.add(steps, ms, num_read)
    for steps in windows:
        assert own.draft.ms(steps) == pytest.approx(2.0 * steps, rel=0.15)
    assert own.draft.ms(0, 1000) - own.draft.ms(0) == pytest.approx(40.0, rel=0.25)


def test_rounds_that_mostly_read_say_little_of_steps():
    """Red if a draft that is tried seldom, and then reads thousands of tokens, looks
    dearer with each trial: what they take is never known exactly."""
    own, rng = CostModel().at(8), random.Random(0)
    for k in range(60):
        num_read = rng.randrange(500) if k < 40 else rng.randrange(6000, 9000)
        ms = 30.0 + 0.13 * num_read * rng.uniform(0.9, 1.1)
        own.draft.add(4, ms, num_read)
    assert own.draft.ms(4) == pytest.approx(30.0, rel=0.25)


def test_reading_is_not_told_from_drafting_by_rounds_that_do_both_alike():
    """Red if the time of the steps is taken for reading where long drafts happened to
    begin with long prompts: windows would be far too long."""
    own = CostModel().at(8)
    for steps, num_read in ((32, 800), (16, 400), (8, 200), (24, 600), (12, 300)):
        own.draft.add(steps, 2.0 * steps, num_read)
    assert own.draft.ms(16) == pytest.approx(32.0, rel=0.1)


def test_a_token_or_two_tell_nothing_of_what_prompts_cost():
    """Red if noise of rounds that read next to nothing becomes a price of prompts."""
    own, rng = CostModel().at(8), random.Random(1)
    for _ in range(200):
        noise = rng.lognormvariate(0, 0.1)
        own.draft.add(rng.choice((12, 16)), 32.0 * noise, rng.randrange(3))
    assert own.draft.ms(0, 800) - own.draft.ms(0) < 100.0


def test_before_drafts_are_timed_they_are_compared_with_plain_steps():
    """Red if a draft of which nothing is known looks a hundred times as fast as a
    target whose steps take long, or slower than one whose steps are short."""
    costs = CostModel()
    assert costs.nearest(4).draft.ms(12) == pytest.approx(12.0, rel=0.01)
    costs.at(1).plain.add(60.0)
    assert costs.nearest(4).draft.ms(12) == pytest.approx(60.0, rel=0.01)
    assert costs.nearest(4).verify.ms(1) == pytest.approx(60.0, rel=0.01)
