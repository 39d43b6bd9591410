"""Drafts that were good for long and are good no more, on the virtual clock."""

from dataclasses import replace

import pytest

from benchmarks.simulate.drafts import Drafts
from benchmarks.simulate.scenarios import pair_costs
from benchmarks.simulate.world import Scenario, World, target_alone

GOOD, HOSTILE = Drafts(kept=0.95), Drafts(kept=0.01, agreement=0.0)


def world_of(bs: int, **more) -> World:
    scenario = Scenario(
        pair_costs("32b+1.7b-h200"), concurrency=bs, drafts=GOOD, noise=0.0, **more
    )
    return World(scenario)


def seconds(world: World, num: float) -> float:
    """Tokens a millisecond of so many seconds more."""
    start_ms, start = world.clock.ms, world.tokens
    while world.clock.ms < start_ms + 1000 * num:
        world._step()
    return (world.tokens - start) / (world.clock.ms - start_ms)


@pytest.mark.parametrize("bs", [1, 8])
def test_drafts_that_turn_bad_are_soon_left_alone(bs):
    """Red if thousands of good tokens outweigh dozens of drafts that failed at once."""
    world = world_of(bs)
    while world.tokens < 20_000:
        world._step()
    alone = target_alone(replace(world.scenario, num_tokens=2000)).rate
    world.scenario = replace(world.scenario, drafts=HOSTILE)
    seconds(world, 20)
    assert seconds(world, 10) > 0.9 * alone


def test_a_choice_holds_while_an_answer_nears_its_end(monkeypatch):
    """Red if each round in which nobody drafts begins with a search for windows."""
    world = world_of(1, answers=(250, 250))
    world.scenario = replace(world.scenario, drafts=HOSTILE)
    seconds(world, 20)
    controller, searches, rounds = world.engine.planner.controller, [], []
    best = controller._best
    monkeypatch.setattr(
        controller, "_best", lambda asked: searches.append(asked) or best(asked)
    )
    world.watch = rounds.append
    seconds(world, 20)
    assert len(rounds) > 50 and len(searches) < 0.6 * len(rounds)
