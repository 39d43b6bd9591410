"""Graphs of a head: what is captured, and what a replayed step reads."""

from __future__ import annotations

import dataclasses
import logging
from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.cuda_graph_config import Backend, Phase
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import (
    DecodeCudaGraphRunner,
)
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_parse.drafting import head_graphs
from sglang_parse.drafting.head_graphs import HeadGraphs, HeadInput
from sglang_parse.drafting.head_model import ChainRequest, HeadHint, HeadRows
from sglang_parse.options.table import EAGLE3, MTP
from tests.support.counting import CountingHead

MOST = 4
TABLE = 100 * torch.arange(4)[:, None] + torch.arange(40)


class Runner:
    """A head's ModelRunner while SGLang captures; keeps what was captured."""

    def __init__(self, width: int = 6, steps: object = "decode graphs") -> None:
        self.device, self.dtype = "cuda", torch.float32
        self.model_config = SimpleNamespace(hidden_size=1)
        self.decode_attention_backend_str = "flashinfer"
        self.spec_algorithm = "PARSE"
        self.eager_runner = self.decode_cuda_graph_runner = "eager"
        self.prefill_cuda_graph_runner = None
        self.width, self.steps = width, steps
        self.captured: list[tuple] = []

    def init_prefill_cuda_graph(self, force_for_draft_worker: bool) -> None:
        assert force_for_draft_worker
        self.captured.append(("prefills", self.spec_algorithm))
        states = torch.zeros(16, self.width)
        graphs = SimpleNamespace(static_draft_hidden_states=states)
        self.prefill_cuda_graph_runner = graphs

    def init_decode_cuda_graph(self) -> None:
        self.decode_cuda_graph_runner = None
        if isinstance(self.steps, Exception):
            raise self.steps
        inputs = []
        for bs in (MOST, 2, 1):
            graphs = SimpleNamespace(max_num_token=MOST, model_runner=self)
            inputs.append(DecodeCudaGraphRunner.get_spec_info(graphs, bs))
        self.captured.append(("steps", self.spec_algorithm, inputs))
        self.decode_cuda_graph_runner = self.steps


@pytest.fixture
def backends(monkeypatch):
    """The kinds of graphs that the server has, by phase."""
    found = {Phase.PREFILL: Backend.BREAKABLE, Phase.DECODE: Backend.FULL}
    monkeypatch.setattr(
        head_graphs,
        "check_cuda_graph_backend",
        lambda phase, kind: found[phase] == kind,
    )
    monkeypatch.setattr(torch, "zeros", on_host(torch.zeros))
    return found


def on_host(make):
    return lambda *size, device=None, **more: make(*size, **more)


@pytest.mark.parametrize("kind", [EAGLE3, MTP])
def test_prefills_are_captured_as_sglangs_own_and_steps_with_their_states(
    backends, kind
):
    """Red if a graph reads no hidden states, steps are captured as verify passes, or
    what was changed for the capture stays so."""
    runner, before = Runner(), DecodeCudaGraphRunner.get_spec_info
    graphs = HeadGraphs(runner, 6, kind)
    graphs.capture()
    prefills, (name, algorithm, inputs) = runner.captured
    own = {EAGLE3: SpeculativeAlgorithm.EAGLE3, MTP: SpeculativeAlgorithm.EAGLE}
    assert prefills == ("prefills", own[kind])
    assert (name, algorithm) == ("steps", SpeculativeAlgorithm.NONE)
    assert [len(one.hidden_states) for one in inputs] == [MOST, 2, 1]
    for one in inputs:
        assert one.hidden_states.data_ptr() == graphs.states.data_ptr()
        assert one.capture_hidden_mode == CaptureHiddenMode.LAST
    assert runner.spec_algorithm == "PARSE"
    assert DecodeCudaGraphRunner.get_spec_info is before
    assert runner.decode_cuda_graph_runner == "decode graphs"


@pytest.mark.parametrize(
    ("change", "what", "why"),
    [
        ({Phase.PREFILL: Backend.DISABLED}, "prefills", "is not breakable"),
        ({Phase.PREFILL: Backend.FULL}, "prefills", "is not breakable"),
        ({Phase.DECODE: Backend.DISABLED}, "steps", "decode graphs are off"),
        ({"width": 4}, "prefills", "captured 4 features a token, expected 6"),
        ({"backend": "triton"}, "steps", "triton takes its columns"),
        ({"steps": None}, "steps", "SGLang captured none"),
        ({"steps": RuntimeError("no\nroom")}, "steps", "no room"),
    ],
)
def test_what_cannot_be_captured_runs_without_and_the_log_says_so_once(
    backends, caplog, change, what, why
):
    """Red if SGLang's switches are not honoured, a refused capture ends the server, or
    nobody hears of it."""
    backends.update({k: v for k, v in change.items() if k in backends})
    runner = Runner(change.get("width", 6), change.get("steps", "decode graphs"))
    runner.decode_attention_backend_str = change.get("backend", "flashinfer")
    graphs = HeadGraphs(runner, 6, EAGLE3)
    with caplog.at_level(logging.INFO, head_graphs.__name__):
        graphs.capture()
    (line,) = (r.message for r in caplog.records)
    assert what in line and why in line
    if what == "prefills":
        assert runner.prefill_cuda_graph_runner is None
        assert graphs.states is not None
    else:
        assert runner.prefill_cuda_graph_runner is not None
        assert runner.decode_cuda_graph_runner == "eager" and graphs.states is None
    assert runner.spec_algorithm == "PARSE"


def test_nothing_is_captured_on_cpu(caplog):
    """Red if a CPU server logs of graphs, or tries to capture some."""
    runner = Runner()
    runner.device = "cpu"
    with caplog.at_level(logging.INFO, head_graphs.__name__):
        HeadGraphs(runner, 6, EAGLE3).capture()
    assert not runner.captured and not caplog.records


class ReplayingHead(CountingHead):
    """Its steps read and write the same memory each time, as captured ones do, up to
    `MOST` requests; longer batches run without graphs."""

    def __init__(self) -> None:
        super().__init__()
        self.graphs.states = torch.zeros(MOST, 1)
        self.shown = torch.zeros(MOST, 1)
        self.replayed: list[int] = []

    def _forward(self, batch, path):
        num = len(batch.rows)
        if batch.mode.is_extend() or num > MOST:
            return super()._forward(batch)
        states = self.graphs.states[:num].clone()
        batch.spec_info = dataclasses.replace(batch.spec_info, hidden_states=states)
        output = super()._forward(batch)
        self.replayed.append(num)
        self.shown[:num].copy_(output.hidden_states)
        return SimpleNamespace(
            next_token_logits=output.next_token_logits, hidden_states=self.shown[:num]
        )


@pytest.mark.parametrize("num", [1, 3, 6])
def test_a_replayed_chain_is_the_eager_one(num):
    """Red if a captured step reads the hidden states of another step or request, or a
    batch with no graph fails."""
    table = 100 * torch.arange(8)[:, None] + torch.arange(40)
    orders = [
        ChainRequest(
            i,
            10 + i,
            5,
            HeadHint(torch.tensor(2 * i), torch.tensor([0.5 * i]), torch.tensor(0.5)),
        )
        for i in range(num)
    ]
    eager, replaying = CountingHead(), ReplayingHead()
    assert replaying.propose(orders, table) == eager.propose(orders, table)
    assert replaying.replayed == ([num] * 4 if num <= MOST else [])
    for ours, theirs in zip(replaying.batches, eager.batches, strict=True):
        read, expected = ours.spec_info, theirs.spec_info
        assert torch.equal(read.hidden_states, expected.hidden_states)


def test_a_hint_outlives_the_steps_behind_it():
    """Red if a chain goes on from what a later replay left in a graph's memory."""
    head = ReplayingHead()
    rows = [HeadRows(0, 2, [3, 4], torch.zeros(2, 6))]
    (first,) = head.follow(rows, TABLE)
    before = first.hidden.clone()
    head.propose([ChainRequest(0, 4, 4, first)], TABLE)
    assert torch.equal(first.hidden, before)


def test_states_are_replaced_as_sglang_does_at_a_replay():
    """Red if a prefill graph cannot put its own buffer in place of the states."""
    one = HeadInput(torch.zeros(2, 6))
    other = dataclasses.replace(one, hidden_states=torch.ones(4, 6))
    assert isinstance(other, HeadInput) and len(other.hidden_states) == 4
    assert other.is_draft_input() == one.is_draft_input()
    assert other.capture_hidden_mode == CaptureHiddenMode.LAST
