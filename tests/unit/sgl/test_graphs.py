"""Verify passes by prefill graphs: what would be replayed, and when nothing is."""

import logging
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from sglang_parse.sgl import graphs as module
from sglang_parse.sgl.compat import backend_changes
from sglang_parse.sgl.compat.backend_changes import plan_plain_decode
from sglang_parse.sgl.graphs import PassGraphs


class FakePrefillGraphs:
    """SGLang's runner as a pass meets it; keeps what it would replay."""

    prefill_backend_name = "breakable"
    buckets = (16, 64)

    def __init__(self, **flags) -> None:
        self._backend_can_run_prefill_cuda_graph = None
        self.capture_hidden_mode = CaptureHiddenMode.FULL
        self._prefill_static_buffers = {
            name: torch.zeros(4, dtype=torch.int64)
            for name in ("seq_lens", "extend_seq_lens", "extend_prefix_lens")
        }
        self.replayed: list[tuple[int, int]] = []
        for name, value in flags.items():
            setattr(self, name, value)

    def can_run_graph(self, batch) -> bool:
        return False  # as SGLang answers in verify mode

    def can_replay_locally(self, *, num_tokens, capture_hidden_mode, **_) -> bool:
        fits = num_tokens <= max(self.buckets)
        return fits and capture_hidden_mode <= self.capture_hidden_mode

    def execute(self, batch) -> None:
        for name, buffer in self._prefill_static_buffers.items():
            buffer[: batch.batch_size].copy_(getattr(batch, name))
        size = min(b for b in self.buckets if b >= len(batch.input_ids))
        self.replayed.append((len(batch.input_ids), size))


class FakeRunner:
    """A ModelRunner's choice between graphs (model_runner.py, `_forward_raw`)."""

    device = "cuda"

    def __init__(self, prefill, decode="decode graphs") -> None:
        self.prefill_cuda_graph_runner = prefill
        self.decode_cuda_graph_runner = decode
        self.eager = 0

    def forward(self, batch) -> None:
        assert self.decode_cuda_graph_runner is None, "a decode graph took the pass"
        graphs = self.prefill_cuda_graph_runner
        if graphs is not None and graphs.can_run_graph(batch):
            graphs.execute(batch)
        else:
            self.eager += 1


def make_batch(num_sequences: int, rows: int):
    lens = torch.arange(1, num_sequences + 1)
    return SimpleNamespace(
        batch_size=num_sequences,
        input_ids=torch.zeros(rows),
        seq_lens=lens,
        seq_lens_cpu=lens,
        extend_seq_lens=lens.int(),
        extend_prefix_lens=lens.int(),
        extend_prefix_lens_cpu=lens.tolist(),
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )


def run(runner: FakeRunner, *batches) -> None:
    passes = PassGraphs(runner)
    for batch in batches:
        with passes.serve(batch):
            runner.forward(batch)


def test_a_pass_replays_the_next_larger_prefill_graph():
    """Red if passes stay eager where a graph fits, a decode graph takes them, or what
    was changed for a pass stays so for a prefill."""
    prefill = FakePrefillGraphs()
    runner, before = FakeRunner(prefill), dict(prefill._prefill_static_buffers)
    # Seven sequences of two requests: more than there are requests.
    run(runner, make_batch(7, 40), make_batch(2, 9))
    assert prefill.replayed == [(40, 64), (9, 16)]
    assert runner.eager == 0
    assert runner.decode_cuda_graph_runner == "decode graphs"
    assert prefill._prefill_static_buffers == before
    assert not prefill.can_run_graph(make_batch(1, 1))


def test_a_pass_longer_than_any_graph_runs_without(caplog):
    """Red if a long pass fails, or fills the log."""
    runner = FakeRunner(FakePrefillGraphs())
    with caplog.at_level(logging.INFO, module.__name__):
        run(runner, make_batch(2, 65), make_batch(2, 65))
    assert runner.eager == 2
    assert not caplog.records


@pytest.mark.parametrize(
    ("prefill", "why"),
    [
        (None, "prefill graphs are off"),
        (SimpleNamespace(), "prefill graphs are off"),
        (FakePrefillGraphs(prefill_backend_name="full"), "of kind full"),
        (FakePrefillGraphs(is_multimodal=True), "reads more than tokens"),
        (FakePrefillGraphs(enable_lora=True), "LoRA is on"),
    ],
)
def test_without_fitting_graphs_the_log_says_so_once(prefill, why, caplog):
    """Red if SGLang's own switches are not honoured, or each pass writes a line."""
    runner = FakeRunner(prefill)
    with caplog.at_level(logging.INFO, module.__name__):
        run(runner, make_batch(2, 9), make_batch(2, 9))
    assert runner.eager == 2
    assert runner.prefill_cuda_graph_runner is prefill
    (line,) = (r.message for r in caplog.records)
    assert why in line


def test_a_failing_pass_leaves_the_graphs_as_they_were():
    """Red if an error in a pass makes SGLang's prefills replay as passes do."""
    prefill = FakePrefillGraphs()
    runner = FakeRunner(prefill)
    with pytest.raises(RuntimeError), PassGraphs(runner).serve(make_batch(7, 9)):
        raise RuntimeError("out of memory")
    assert runner.decode_cuda_graph_runner == "decode graphs"
    assert len(prefill._prefill_static_buffers["seq_lens"]) == 4
    assert not prefill.can_run_graph(make_batch(1, 1))


def test_graphs_are_captured_with_hidden_states_and_nothing_else_is(monkeypatch):
    """Red if graphs refuse passes that read hidden states, or the server goes on to
    return them with every answer."""
    features = SimpleNamespace(return_hidden_states_mode=None)

    @contextmanager
    def override(**values):
        before = dict(vars(features))
        vars(features).update(values)
        yield
        vars(features).update(before)

    features.override = override
    monkeypatch.setattr(
        backend_changes, "get_exec", lambda: SimpleNamespace(features=features)
    )
    seen = []
    runner = SimpleNamespace(
        init_cuda_graphs=lambda **more: seen.append(
            (features.return_hidden_states_mode, more)
        )
    )
    plan_plain_decode(runner, shows_states=True)
    runner.init_cuda_graphs(capture_decode_cuda_graph=True)
    assert seen == [("full", {"capture_decode_cuda_graph": True})]
    assert features.return_hidden_states_mode is None
