"""The simulator of rounds and its costs."""

import json
import random
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from benchmarks.simulate.costs import MeasuredCosts
from benchmarks.simulate.drafts import WRONG, Drafts, error_rate
from benchmarks.simulate.measure import leaving_rate
from benchmarks.simulate.oracle import Setting, run_fixed
from benchmarks.simulate.scenarios import (
    PAIRS,
    bound,
    pair_costs,
    scenarios,
)
from benchmarks.simulate.validate import compare, drafts_of
from benchmarks.simulate.waves import compare as compare_waves
from benchmarks.simulate.waves import table as waves_table
from benchmarks.simulate.world import Scenario, World, target_alone

REPOSITORY = Path(__file__).parents[2]
COSTS = pair_costs("32b+1.7b-h200")


@pytest.mark.parametrize("pair", PAIRS)
def test_costs_rise_with_the_work(pair):
    """Red if more rows or requests are ever cheaper."""
    costs = pair_costs(pair)
    for one in (costs.plain_ms, costs.step_ms, lambda n: costs.pass_ms(40 * n, n)):
        times = [one(n) for n in (1, 8, 32, 64)]
        assert times == sorted(times) and times[0] > 0
    assert costs.step_ms(1) < costs.plain_ms(1) < costs.pass_ms(4096, 1)


def test_an_mtp_head_costs_one_layer_and_the_lm_head():
    """Red if a step of it is charged for the target's layers, or for none."""
    for graphs in (True, False):
        costs = pair_costs("235b+8b-h100-tp8", graphs=graphs, ships_head=True)
        assert costs.plain_ms(1) / 94 < costs.head_step_ms(1) < costs.plain_ms(1) / 4


@pytest.mark.parametrize("kept", [0.5, 0.8, 0.9])
def test_errors_keep_the_share_that_is_asked_for(kept):
    """Red if "kept 0.9" means another share of a draft."""
    rng, rate, total = random.Random(0), error_rate(kept), 0
    for _ in range(4000):
        kinds = Drafts(kept).kinds(rng, [False] * 256, rate)
        total += kinds.index(WRONG) if WRONG in kinds else 256
    assert total / (4000 * 256) == pytest.approx(kept, abs=0.02)


def test_the_target_alone_takes_its_time():
    """Red if the virtual clock loses or invents time."""
    result = target_alone(Scenario(COSTS, num_tokens=500, noise=0.0))
    ms = COSTS.plain_ms(1)  # its Python runs beside the steps
    prefill_ms = result.spent["prefill"]
    assert result.ms - prefill_ms == pytest.approx(500 * ms, rel=0.03)
    assert sum(result.spent.values()) == pytest.approx(result.ms)


def test_a_draft_that_is_always_right_reaches_the_bound():
    """Red if rounds lose time to something that the cost tables do not say."""
    one = Scenario(
        COSTS, drafts=Drafts(1.0, 1.0), answers=(8000, 8000), num_tokens=16_000
    )
    result = run_fixed(one, Setting(window=256, every=3))
    assert result.rate * COSTS.plain_ms(1) > 0.9 * bound(COSTS, 1, 1.0)


def test_arrivals_wait_while_a_round_runs():
    """Red if requests that arrive in the middle of a round are served at once."""
    one = Scenario(COSTS, concurrency=4, arrivals_s=1.0, num_tokens=4000)
    world = World(one)
    result = world.run()
    assert max(result.waits_ms) > 50
    assert len(world.active) <= 4


def test_there_are_24_scenarios():
    """Red if the regret is taken over fewer."""
    assert len(scenarios()) == 24


def test_the_measured_table_can_be_run():
    """Red if the CPU's table is out of step with the costs of a round."""
    costs = MeasuredCosts.load("cpu-embedded")
    result = World(Scenario(costs, num_tokens=600)).run()
    assert result.rate > 1 / costs.plain_ms(1)


def test_measured_speeds_are_compared_with_the_same_arms():
    """Red if repeats are not averaged, or an arm that the simulator lacks is compared
    with another."""
    rows = [
        {"arm": arm, "concurrency": 1, "ratio": ratio}
        for arm, ratio in (
            ("target", None),
            ("one-segment", 3.0),
            ("one-segment", 4.0),
            ("hostile", 0.9),
        )
    ]
    (one,) = compare(rows, MeasuredCosts.load("cpu-embedded"), drafts_of(0.05))
    assert (one.arm, one.concurrency, one.measured) == ("one-segment", 1, 3.5)
    assert one.simulated == pytest.approx(3.5 * (1 + one.difference))
    assert 2.5 < one.simulated < 5.5


def test_how_often_the_target_leaves_the_draft_is_counted():
    """Red if a draft that was kept whole counts as left, if rounds of several requests
    or with verdicts count, or if more disagreements make drafts agree more."""
    one = {"bs": 1, "judged": 0, "steps": 12, "token_steps": 0}
    rounds = [
        {**one, "tokens": 13},
        {**one, "tokens": 3},
        {**one, "tokens": 2, "judged": 1},
        {**one, "tokens": 9, "bs": 8},
        {**one, "tokens": 4, "steps": 0},
    ]
    assert leaving_rate(rounds) == pytest.approx(1 / (12 + 3))
    with pytest.raises(ValueError, match="exact mode"):
        leaving_rate(rounds[2:])
    rare, often = drafts_of(0.03), drafts_of(0.06)
    assert 0 < rare.own_words < often.own_words <= 1
    assert drafts_of(0.0).own_words == 0


def test_waves_of_a_gpu_are_simulated_cell_by_cell():
    """Red if a cell is left out, or has another mode or other made-up values."""
    cell = {"concurrency": 2, "context": 100, "output": 64, "waves": [{}, {}]}
    arms = [
        ("target", {}, {}, 100.0),
        ("parse-1.0", {"kept_fraction": 1.0, "accept_length": 1.0}, {}, 400.0),
        (
            "exact",
            {"kept_fraction": 1.0, "accept_length": 5.0},
            {"parse_mode": "exact"},
            200.0,
        ),
        ("eagle3", {"accept_length": 5.0}, {}, 150.0),
    ]
    records = [
        cell
        | {"arm": arm, "pinned": pinned, "fields": fields}
        | {"tokens_per_s": {"median": rate}}
        for arm, pinned, fields, rate in arms
    ]
    found = compare_waves([*records, {"arm": "target", "error": "none"}], COSTS)
    assert [(w.arm, w.concurrency, w.measured) for w in found] == [
        (arm, 2, rate) for arm, _, _, rate in arms[:3]
    ]
    alone, parse, exact = (w.simulated for w in found)
    assert parse > exact > 1.5 * alone
    assert waves_table(found).splitlines()[-1].startswith("| exact | 2 | 200 | ")


@pytest.mark.parametrize("concurrency", [1, 32])
def test_plain_steps_in_a_row_hide_most_of_the_hosts_work(concurrency):
    """Red if the scheduler is asked after each plain step, or its time costs nothing,
    so that PARSE looks faster than SGLang where nobody drafts."""
    alone = Scenario(
        COSTS, mode="off", concurrency=concurrency, num_tokens=4000 * concurrency
    )
    world = World(alone)
    steps = []
    world.watch = lambda round: steps.append(round.num_steps)
    share = world.run().rate / target_alone(alone).rate
    assert 0.93 < share < 0.99 and median(steps) > 4


def test_short_passes_cost_what_a_decode_step_does():
    """Red if passes with verdicts, or ones without graphs, are taken for decode steps,
    or those of long contexts for cheap ones."""
    costs = pair_costs("235b+8b-h100-tp8")
    step = costs.plain_ms(6)
    assert costs.pass_ms(6, 1, asks=False) == step < costs.pass_ms(6, 1) - 1.5
    others = (
        replace(costs, short_passes=False),
        replace(costs, graphs=False),
        replace(costs, context=1 << 16),
    )
    for one in others:
        assert one.pass_ms(6, 1, asks=False) == one.pass_ms(6, 1)


def test_the_simulator_is_held_to_what_a_card_measured():
    """Red if the host's time is lost from the costs, or the target alone pays for it:
    exact mode at one request was 27% too fast then. The card ran rounds in lock-step,
    which quanta have replaced, so they need not be as slow."""
    records = REPOSITORY / "benchmarks" / "results" / "gpu_second" / "serve.jsonl"
    rows = [json.loads(line) for line in records.read_text("utf-8").splitlines()]
    rows = [r for r in rows if r["arm"] in ("target", "exact")]
    # No pass was a decode step then.
    costs = replace(pair_costs("32b+1.7b-h200"), short_passes=False)
    found = compare_waves(rows, costs)
    assert len(found) == 6
    assert max(abs(one.difference) for one in found) < 0.12
