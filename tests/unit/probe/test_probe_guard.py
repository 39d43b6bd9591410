"""The guard finds out a probe that has become wrong, and leaves a good one alone."""

import random

import pytest

from sglang_parse.probe.probe_guard import ProbeGuard


def run(guard, agreement, boundaries, rng, until=lambda guard: False):
    """Boundaries until the guard drops the probe, or all of them."""
    for k in range(boundaries):
        if guard.draw():
            guard.compare(agrees=rng.random() < agreement)
        if until(guard):
            return k + 1
    return boundaries


@pytest.mark.parametrize("served_before", [0, 5000])
def test_drift_is_found_within_500_boundaries(served_before):
    """Red if a probe of another task, of the question's opinion in 7 of 10 cases, goes
    on to judge after 500 boundaries in more than seven runs of a hundred. Of ten
    boundaries that are drawn, all agree in three runs of a hundred."""
    late = 0
    for seed in range(100):
        guard, rng = ProbeGuard(share=0.02, least=0.95, seed=seed), random.Random(seed)
        run(guard, 0.995, served_before, rng)
        assert guard.holds
        if run(guard, 0.7, 500, rng, lambda g: not g.holds) == 500 and guard.holds:
            late += 1
    assert late <= 7


def test_a_good_probe_is_left_alone_at_two_percent():
    """Red if chance alone drops a probe, or the guard asks much more than its share."""
    dropped = asked = 0
    for seed in range(30):
        guard, rng = ProbeGuard(share=0.02, least=0.95, seed=seed), random.Random(seed)
        run(guard, 0.995, 20_000, rng)
        dropped += guard.num_fallbacks
        asked += guard.num_compared
    assert dropped == 0
    assert 0.02 * 20_000 <= asked / 30 <= 0.045 * 20_000


def test_it_comes_back_when_the_agreement_holds_and_says_so_once():
    """Red if a probe that was dropped stays away, or is told of at each boundary."""
    guard, rng, told = ProbeGuard(share=0.02, least=0.95), random.Random(1), []
    for agreement, num in ((0.6, 500), (0.99, 2000)):
        for _ in range(num):
            if guard.draw():
                told.append(guard.compare(agrees=rng.random() < agreement))
    said = [text for text in told if text]
    assert len(said) == 2 and guard.holds and guard.num_fallbacks == 1
    assert "the question judges again" in said[0] and "used again" in said[1]


def test_without_a_share_nothing_is_asked():
    """Red if a guard that is switched off still costs rows."""
    guard = ProbeGuard(share=0.0, least=0.95)
    assert not any(guard.draw() for _ in range(1000))
