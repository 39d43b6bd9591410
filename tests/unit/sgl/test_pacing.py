"""Captured steps are planned while the device lags behind."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.drafting import draft_model
from sglang_parse.drafting.lanes import DraftPhase, DraftRequest
from sglang_parse.sgl.fast_paths import FastPaths
from sglang_parse.sgl.pacing import StepPacer
from sglang_parse.verify import passes
from tests.support.counting import GREEDY, CountingDraft

BUFFER = "_pin_memory_int_workspace_buffer"


class Device:
    """Does what is launched in order, and nothing before somebody waits for it."""

    def __init__(self) -> None:
        self.queue: deque = deque()
        self.num_done = self.num_launched = self.waits = 0

    def launch(self, work) -> None:
        self.queue.append(work)
        self.num_launched += 1

    def run_until(self, number: int) -> None:
        while self.num_done < number:
            self.queue.popleft()()
            self.num_done += 1

    def event(device):  # noqa: N805
        class Event:
            def record(self) -> None:
                self.number = device.num_launched

            def synchronize(self) -> None:
                device.waits += 1
                device.run_until(self.number)

        return Event


class PlannedDraft(CountingDraft):
    """Its captured steps attend by plans that the device copies when it comes to them,
    as FlashInfer's do (flashinfer/decode.py, `fast_decode_plan`)."""

    def __init__(self, device: Device) -> None:
        super().__init__()
        wrapper = SimpleNamespace(**{BUFFER: torch.zeros(4, dtype=torch.int64)})
        self.wrapper, self.device = wrapper, device
        self.attended: list[list[int]] = []
        self.asked: list[list[int]] = []
        self.ahead: list[int] = []
        self.runner = SimpleNamespace(
            device="cuda",
            decode_cuda_graph_runner=object(),
            attn_backend=SimpleNamespace(decode_cuda_graph_metadata={2: [wrapper]}),
        )

    def _forward(self, batch, path):
        if not batch.mode.is_extend():
            lens = batch.seq_lens_cpu.tolist()
            buffer = getattr(self.wrapper, BUFFER)
            buffer[: len(lens)] = torch.tensor(lens)
            self.asked.append(lens)
            self.device.launch(
                lambda: self.attended.append(buffer[: len(lens)].tolist())
            )
            self.ahead.append(self.device.num_launched - self.device.num_done)
        return super()._forward(batch)


@pytest.fixture
def lagging(monkeypatch) -> Device:
    for name in ("draft_tp_context", "draft_pp_context"):
        monkeypatch.setattr(draft_model, name, lambda *_: nullcontext())
    monkeypatch.setattr(draft_model, "draft_rows", lambda *_: GREEDY)
    device = Device()
    module = SimpleNamespace(Event=device.event())
    monkeypatch.setattr(torch, "get_device_module", lambda _: module)
    return device


def orders(num_new: int, num_missing: int) -> list[DraftRequest]:
    return [
        DraftRequest(
            row=row,
            tokens=[5] * length,
            num_cached=length - num_missing,
            num_new=num_new,
            stop_ids=frozenset(),
            batch_index=row,
        )
        for row, length in ((0, 4), (1, 9))
    ]


def propose(model: PlannedDraft, requests: list[DraftRequest], table) -> None:
    model.propose(requests, table=table, sampling_info=GREEDY, phase=DraftPhase())


@pytest.mark.parametrize("num_missing", [1, 2, 4])
def test_a_step_attends_by_its_own_plan(lagging, num_missing):
    """Red if a plan is overwritten before the device has copied it: between steps, or
    between those that catch up with one or two tokens."""
    model = PlannedDraft(lagging)
    table = 100 * torch.arange(4)[:, None] + torch.arange(40)
    for _ in range(2):  # a second round begins while the first is under way
        propose(model, orders(7, num_missing), table)
    lagging.run_until(lagging.num_launched)
    assert len(model.asked) >= 12
    assert model.attended == model.asked


def test_the_host_is_one_step_ahead(lagging):
    """Red if the host waits for what it has just launched, or runs away."""
    model = PlannedDraft(lagging)
    table = 100 * torch.arange(4)[:, None] + torch.arange(40)
    propose(model, orders(9, 1), table)
    assert model.ahead == [1, *[2] * (len(model.ahead) - 1)]
    assert lagging.waits == len(model.ahead) - 2


def test_plain_steps_in_a_row_attend_by_their_own_plans(lagging, monkeypatch):
    """Red if the target's next step is planned where the device has not copied the plan
    of the one before."""
    wrapper = SimpleNamespace(**{BUFFER: torch.zeros(2, dtype=torch.int64)})
    attended, asked = [], []

    def forward(batch, forward_batch, is_verify):
        lens, buffer = forward_batch.seq_lens_cpu, getattr(wrapper, BUFFER)
        buffer.copy_(lens)
        asked.append(lens.tolist())
        lagging.launch(lambda: attended.append(buffer.tolist()))
        return SimpleNamespace(logits_output=None)

    verifier = object.__new__(passes.TargetVerifier)
    verifier.paths = FastPaths()
    verifier.runner = SimpleNamespace(
        device="cuda",
        decode_cuda_graph_runner=None,
        # FlashInfer's backend has words of its own under these names.
        attn_backend=SimpleNamespace(
            decode_backend="auto",
            prefill_backend="fa2",
            decode_cuda_graph_metadata={2: [wrapper]},
        ),
    )
    verifier.shows_features, verifier.shown, verifier.spec_algorithm = False, None, None
    verifier.target_worker = SimpleNamespace(forward_batch_generation=forward)
    verifier._output = lambda *_, **__: passes.PassOutput(None, None)
    monkeypatch.setattr(
        passes, "build_batch", lambda *_, **fields: SimpleNamespace(**fields)
    )
    rows = torch.tensor([0, 1])
    for k in range(4):
        lens = torch.tensor([5, 9]) + k
        verifier.decode(
            input_ids=rows,
            req_pool_indices=rows,
            seq_lens=lens,
            seq_lens_cpu=lens,
            table=torch.zeros(2, 20, dtype=torch.int32),
            return_hidden_states=False,
        )
    lagging.run_until(lagging.num_launched)
    assert attended == asked == [[6 + k, 10 + k] for k in range(4)]


def test_nothing_is_paced_on_cpu():
    """Red if CPU drafts pay for events."""
    pacer = StepPacer(SimpleNamespace(device="cpu"))
    for _ in range(5):
        pacer.wait()
        pacer.mark()
    assert not pacer._running
