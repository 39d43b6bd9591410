"""The draft loop, with a model whose next token is the last one plus one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_parse import draft as draft_module
from sglang_parse.draft import DraftModel, DraftRequest, StepPacer
from sglang_parse.draft_runner import plan_plain_decode

VOCAB = 64


class CountingDraft(DraftModel):
    """DraftModel with its forwards replaced; keeps every batch it was asked to run."""

    def __init__(self, interval: int) -> None:
        self.stop_check_interval = interval
        self.batches: list[SimpleNamespace] = []

    def _forward_batch(self, mode, **fields) -> SimpleNamespace:
        return SimpleNamespace(mode=mode, **fields)

    def _forward(self, batch: SimpleNamespace) -> SimpleNamespace:
        self.batches.append(batch)
        last = batch.input_ids
        if batch.mode.is_extend():
            last = batch.input_ids[torch.cumsum(batch.extend_seq_lens, 0) - 1]
        logits = torch.zeros(len(batch.rows), VOCAB)
        logits[torch.arange(len(batch.rows)), (last + 1) % VOCAB] = 1.0
        return SimpleNamespace(next_token_logits=logits)


@pytest.fixture(autouse=True)
def greedy(monkeypatch):
    info = SimpleNamespace(is_all_greedy=True)
    monkeypatch.setattr(draft_module, "draft_rows", lambda *_: info)


def request(row: int, tokens: list[int], num_new: int, **more) -> DraftRequest:
    fields = {"num_cached": 0, "stop_ids": frozenset(), "batch_index": row} | more
    return DraftRequest(row=row, tokens=tokens, num_new=num_new, **fields)


def propose(model: CountingDraft, requests: list[DraftRequest]):
    table = 100 * torch.arange(4)[:, None] + torch.arange(40)
    return model._propose(requests, table, SimpleNamespace(is_all_greedy=True)), table


@pytest.mark.parametrize("interval", [1, 3, 8])
def test_windows_and_stops_do_not_depend_on_how_often_one_looks(interval):
    """Red if tokens after a stop token, or past a window, are handed out."""
    model = CountingDraft(interval)
    requests = [
        request(0, [1, 2], 6),
        request(1, [9], 3),
        request(2, [20, 21, 22], 6, stop_ids=frozenset({25})),
    ]
    proposal, _ = propose(model, requests)
    assert proposal.tokens == ((3, 4, 5, 6, 7, 8), (10, 11, 12), (23, 24))
    assert proposal.ended == (False, False, True)
    # The last drafted token of a request was never forwarded.
    assert proposal.num_forwarded[:2] == (7, 3)


def test_lengths_on_the_host_are_those_on_the_device():
    """Red if a captured step is planned for other lengths than it runs with."""
    model = CountingDraft(8)
    proposal, table = propose(model, [request(0, [1, 2], 7), request(1, [9], 2)])
    assert proposal.tokens == ((3, 4, 5, 6, 7, 8, 9), (10, 11))
    steps = model.batches[1:]
    assert len(steps) == 6
    for i, batch in enumerate(steps):
        expected = torch.tensor([2 + i, min(1 + i, 1)])
        assert batch.positions.tolist() == expected.tolist()
        assert batch.seq_lens.tolist() == (expected + 1).tolist()
        assert batch.seq_lens_cpu.tolist() == (expected + 1).tolist()
        assert batch.out_cache_loc.tolist() == [int(table[0, 2 + i]), int(table[1, 1])]


@pytest.mark.parametrize(("interval", "looks"), [(1, 12), (4, 3), (8, 2), (100, 1)])
def test_tokens_are_read_back_every_few_steps_alone(monkeypatch, interval, looks):
    """Red if the loop waits for the device at every step."""
    read_back = draft_module._read_back
    calls = []

    def counted(columns, *args):
        calls.append(len(columns))
        return read_back(columns, *args)

    monkeypatch.setattr(draft_module, "_read_back", counted)
    propose(CountingDraft(interval), [request(0, [1], 12)])
    assert len(calls) == looks
    assert sum(calls) == 12


def test_loop_ends_at_the_first_look_after_all_have_stopped():
    """Red if a draft that has ended keeps the model busy for the whole window."""
    model = CountingDraft(4)
    propose(model, [request(0, [1], 30, stop_ids=frozenset({3}))])
    assert len(model.batches) == 4  # the catch-up and three steps, then one look


class FakeEvent:
    log: list[str] = []

    def __init__(self) -> None:
        self.number = sum("record" in line for line in self.log) + 1

    def record(self) -> None:
        self.log.append(f"record {self.number}")

    def synchronize(self) -> None:
        self.log.append(f"wait {self.number}")


def test_pacer_lets_the_host_be_one_step_ahead(monkeypatch):
    """Red if the host waits for the step it has just launched, or runs away."""
    monkeypatch.setattr(FakeEvent, "log", [])
    monkeypatch.setattr(
        torch, "get_device_module", lambda _: SimpleNamespace(Event=FakeEvent)
    )
    pacer = StepPacer(torch.device("cuda"))
    for _ in range(4):
        pacer.wait()
        pacer.mark()
    assert FakeEvent.log == [
        "record 1",
        "record 2",
        "wait 1",
        "record 3",
        "wait 2",
        "record 4",
    ]


def test_nothing_is_paced_on_cpu():
    """Red if CPU drafts pay for events."""
    pacer = StepPacer(torch.device("cpu"))
    for _ in range(5):
        pacer.wait()
        pacer.mark()
    assert not pacer._running


def test_runners_plan_plain_decode_graphs(plugins):
    """Red if SGLang would capture the runners' decode graphs as verify passes again.

    Its capture asks just this of a runner (decode_cuda_graph_runner.py, `__init__`).
    """
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    parse = SpeculativeAlgorithm.from_string("PARSE")
    assert parse.is_speculative() and not parse.supports_target_verify_for_draft()
    runner = SimpleNamespace(spec_algorithm=parse)
    plan_plain_decode(runner)
    assert not runner.spec_algorithm.is_speculative()
    assert runner.spec_algorithm.is_none()
