"""A fast path that raises while the server serves: the plain one takes its place."""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.sgl.fast_paths import (
    ABSENT,
    LEFT_OUT,
    PASS_GRAPHS,
    SHORT_PASSES,
    TARGET_STEPS,
    FastPaths,
    PassLacksMemory,
    RanksDiffer,
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


class OtherRank(Ranks):
    """Agrees with a rank whose paths are `others`."""

    def __init__(self, others):
        super().__init__(SimpleNamespace(world_size=1))
        self.others, self.held = others, None

    def agree_on_least(self, values):
        if self.held is None:  # the other rank's turn
            self.held = list(values)
            return self.held
        return [min(pair) for pair in zip(values, self.held, strict=True)]


def test_ranks_that_raised_alike_go_on_and_one_alone_ends_all():
    """Red if tokens are served behind collectives that may not match, or if an error
    that all ranks had ends the server."""
    ours, others = FastPaths(), FastPaths()

    def sync():
        ranks = OtherRank(others)
        others.sync(ranks)
        ours.sync(ranks)

    for error in (Fault(), torch.OutOfMemoryError()):
        sync()
        ours.break_off(SHORT_PASSES, error, "")
        with pytest.raises(RanksDiffer, match=f"{SHORT_PASSES} raised on some"):
            sync()
        others.break_off(SHORT_PASSES, error, "")
        sync()
    others.break_off(PASS_GRAPHS, Fault(), "")
    with pytest.raises(RanksDiffer):
        sync()


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to"),
    ],
)
def test_a_shortage_of_memory_leaves_a_path_out_for_a_while(error, caplog):
    """Red if a shortage that passes switches a path off until the server restarts, is
    told in each round, or if its tensors are held while the plain path runs."""
    paths, ranks, asked = FastPaths(), Ranks(SimpleNamespace(world_size=1)), []

    def lacks():
        asked.append(torch.zeros(1))
        raise error

    def plain():
        assert error.__traceback__ is None
        return 3

    for quantum in range(LEFT_OUT + 1):
        paths.sync(ranks)
        assert paths.is_on(SHORT_PASSES) == (quantum in (0, LEFT_OUT))
        assert paths.run(SHORT_PASSES, lacks, plain) == 3
    assert len(asked) == len(caplog.records) == 2
    assert "is left out for 64 quanta, because memory ran out" in caplog.text
    for _ in range(LEFT_OUT):
        paths.sync(ranks)
    assert paths.run(SHORT_PASSES, lambda: 5, plain) == 5
    assert not paths.states


# -- Where the paths are taken -------------------------------------------------------


def make_verifier(backend="flashinfer"):
    verifier = object.__new__(TargetVerifier)
    verifier.paths = FastPaths()
    verifier.runner = SimpleNamespace(prefill_attention_backend_str=backend)
    return verifier


def test_a_pass_without_memory_leaves_its_route_to_be_tried_again(caplog):
    """Red if routes are given up for a shortage, so that drafting ends; or if each pass
    under it is told."""
    verifier, ran = make_verifier(), []

    def verify_by(route, plan, *, by_graphs=True):
        ran.append(route)
        raise torch.OutOfMemoryError("out of memory")

    verifier.paths.set(PASS_GRAPHS, ABSENT)
    verifier.verify_by = verify_by
    for _ in range(2):
        with pytest.raises(PassLacksMemory):
            verifier.verify(None)
    assert ran == ["virtual", "mask"] * 2 and len(caplog.records) == 2
    verifier.verify_by = lambda route, plan, **_: route
    assert verifier.verify(None) == "virtual"


def test_short_passes_need_captured_steps_that_are_on():
    """Red if a pass becomes an eager decode step because captured ones are off."""
    verifier = make_verifier()
    verifier.runner.decode_cuda_graph_runner = SimpleNamespace(max_bs=8)
    passes = TargetModel(verifier, None).short_passes
    assert passes.most_rows == 8
    verifier.paths.break_off(TARGET_STEPS, Fault(), "")
    assert passes.most_rows == 0
