"""A fast path that raises while the server serves: the plain one takes its place."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.drafting.runner import DraftRunner
from sglang_parse.sgl.fast_paths import (
    ABSENT,
    DRAFT_STEPS,
    PASS_GRAPHS,
    PATHS,
    SAMPLED_ROWS,
    SHORT_PASSES,
    TARGET_STEPS,
    FastPaths,
    PassFailed,
    route_path,
)
from sglang_parse.sgl.ranks import Ranks
from sglang_parse.verify.model import TargetModel
from sglang_parse.verify.passes import TargetVerifier


class Fault(RuntimeError):
    """Stands for a bug of a fast path."""


def raises(*args, **kwargs):
    raise Fault("no such kernel")


def test_a_path_that_raises_is_off_and_told_once(caplog):
    """Red if an error reaches the scheduler, comes back, or fills the log."""
    paths, told = FastPaths(), []
    paths.on_change = lambda *change: told.append(change)
    with caplog.at_level(logging.INFO):
        assert [paths.run("x", raises, lambda: 3) for _ in range(3)] == [3, 3, 3]
    (record,) = caplog.records
    assert record.exc_info and "x is off" in record.getMessage()
    assert told == [("x", False)]
    assert paths.run("x", raises, lambda: 4) == 4
    assert "Fault: no such kernel" in paths.states["x"].why


def test_an_error_of_both_is_not_the_fast_paths():
    """Red if a request's own error switches a fast path off."""
    paths = FastPaths()
    with pytest.raises(Fault):
        paths.run("x", raises, raises)
    assert paths.is_on("x")


def test_an_absent_path_is_not_run_and_a_proof_sees_what_raises():
    """Red if the proof takes the plain path for a path that raises."""
    paths = FastPaths()
    paths.set("x", ABSENT)
    assert paths.run("x", raises, lambda: 3) == 3
    paths.is_proving = True
    with pytest.raises(Fault):
        paths.run("y", raises, lambda: 3)


def test_ranks_switch_off_what_is_off_on_any():
    """Red if ranks replay different graphs after an error of one of them."""
    paths, ranks = FastPaths(), Ranks(SimpleNamespace(world_size=1))
    paths.sync(ranks)
    assert all(map(paths.is_on, PATHS))
    ranks.agree_on_least = lambda values: [0, *values[1:]]
    paths.sync(ranks)
    assert [name for name in PATHS if not paths.is_on(name)] == [PATHS[0]]


# -- Where the paths are taken -------------------------------------------------------


def make_verifier(backend="flashinfer"):
    verifier = object.__new__(TargetVerifier)
    verifier.asked_route, verifier.paths = "auto", FastPaths()
    verifier.runner = SimpleNamespace(prefill_attention_backend_str=backend)
    return verifier


def test_a_pass_takes_the_next_route_and_the_last_one_says_so():
    """Red if an error of one route ends the server while another could serve."""
    verifier, ran = make_verifier(), []

    def verify_by(route, plan, *, by_graphs=True):
        ran.append((route, by_graphs))
        if route == "virtual":
            raise Fault
        return route

    verifier.verify_by = verify_by
    assert verifier.verify(None) == "mask"
    assert ran == [("virtual", True), ("virtual", False), ("mask", True)]
    assert verifier.routes == ["mask"] and verifier.paths.is_on(PASS_GRAPHS)
    verifier.verify_by = raises
    for _ in range(2):
        with pytest.raises(PassFailed):
            verifier.verify(None)
    assert not verifier.routes


def test_a_pass_whose_graph_raises_runs_without():
    """Red if a route is given up for its graph."""
    verifier = make_verifier()
    verifier.verify_by = lambda route, plan, *, by_graphs=True: (
        raises() if by_graphs else route
    )
    assert verifier.verify(None) == "virtual"
    assert not verifier.paths.is_on(PASS_GRAPHS)
    assert verifier.paths.is_on(route_path("virtual"))


def test_a_short_pass_that_raises_becomes_a_pass(monkeypatch):
    """Red if an error of a short pass costs the round."""
    verifier = make_verifier()
    model = TargetModel(verifier, None)
    monkeypatch.setattr(model.short_passes, "fits", lambda *_: True)
    monkeypatch.setattr(model.short_passes, "run", raises)
    monkeypatch.setattr(model, "_verify", lambda *_: "pass")
    assert model.verify(None, None) == "pass"
    assert not verifier.paths.is_on(SHORT_PASSES)


def test_rows_that_cannot_be_drawn_at_once_are_drawn_one_by_one(monkeypatch):
    """Red if an error of the sampler on many rows costs the round, or a row's token."""
    model, asked = TargetModel(make_verifier(), None), []

    def sample(round, owner, offset):
        asked.append(len(owner))
        if len(owner) > 1:
            raise Fault
        return torch.tensor([10 * owner[0] + offset[0]]), SimpleNamespace()

    monkeypatch.setattr(model, "_sample", sample)
    monkeypatch.setattr(model, "join_samples", len)
    assert model.sample(None, [0, 1, 1], [0, 0, 1]) == ([0, 10, 11], 3)
    assert asked == [3, 1, 1, 1]
    assert not model.verifier.paths.is_on(SAMPLED_ROWS)


class FailingGraphs:
    max_bs = 4


def test_a_draft_step_whose_graph_raises_runs_without():
    """Red if all requests lose their draft model for an error of its graphs."""
    model = object.__new__(DraftRunner)
    model.paths = FastPaths()
    model.runner = SimpleNamespace(
        decode_cuda_graph_runner=FailingGraphs(), prefill_cuda_graph_runner=None
    )

    def forward(batch):
        if model.runner.decode_cuda_graph_runner is not None:
            raise Fault
        return SimpleNamespace(logits_output=batch)

    model.runner.forward = forward
    for step in range(2):
        assert model._forward(step, DRAFT_STEPS) == step
    assert not model.paths.is_on(DRAFT_STEPS)
    assert isinstance(model.runner.decode_cuda_graph_runner, FailingGraphs)


def test_short_passes_need_captured_steps_that_are_on():
    """Red if a pass becomes an eager decode step because captured ones are off."""
    verifier = make_verifier()
    verifier.runner.decode_cuda_graph_runner = SimpleNamespace(max_bs=8)
    passes = TargetModel(verifier, None).short_passes
    assert passes.most_rows == 8
    verifier.paths.break_off(TARGET_STEPS, Fault(), "")
    assert passes.most_rows == 0
