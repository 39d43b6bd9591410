"""Changes of SGLang's objects are undone, and are made only where they are needed."""

import os
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.sgl.compat.backend_changes import IndexBuffer, holds_pass
from sglang_parse.sgl.compat.graph_changes import (
    graphs_of_pass,
    pass_eager_inputs_through,
    shown_by_steps,
)
from sglang_parse.sgl.compat.model_changes import on_device

BUFFERS = (
    IndexBuffer("", "kv_indptr", num_extra=1),
    IndexBuffer("updater", "last_page_len", fill=1),
)


def backend():
    """As FlashInfer's: under `prefill_backend` stands a word, and no backend."""
    updater = SimpleNamespace(last_page_len=torch.ones(2, dtype=torch.int32))
    return SimpleNamespace(
        kv_indptr=torch.zeros(3), updater=updater, prefill_backend="fa2"
    )


@pytest.mark.parametrize("of_two", [False, True])
def test_room_has_an_entry_for_every_sequence_and_is_given_back(of_two):
    """Red if a buffer is too short, of another type, or not filled as SGLang does, or
    if a captured graph's buffer stays replaced after a pass that failed."""
    found = backend()
    pair = SimpleNamespace(prefill_backend=found)
    before = dict(vars(found)), dict(vars(found.updater))
    with (
        pytest.raises(RuntimeError, match="out of memory"),
        holds_pass(pair if of_two else found, BUFFERS, num_sequences=9),
    ):
        assert found.kv_indptr.tolist() == [0.0] * 10
        last = found.updater.last_page_len
        assert last.tolist() == [1] * 9 and last.dtype == torch.int32
        raise RuntimeError("out of memory")
    assert (vars(found), vars(found.updater)) == before
    with holds_pass(found, BUFFERS, num_sequences=2):  # long enough as they are
        assert (vars(found), vars(found.updater)) == before


def test_graphs_come_back_after_a_failure():
    """Red if one failed pass leaves the server without its graphs."""
    runner = SimpleNamespace(
        decode_cuda_graph_runner=object(), prefill_cuda_graph_runner=object()
    )
    before = dict(vars(runner))
    with pytest.raises(RuntimeError), graphs_of_pass(runner):
        assert runner.prefill_cuda_graph_runner is None
        raise RuntimeError
    assert vars(runner) == before


def test_steps_of_other_runners_show_no_states(monkeypatch):
    """Red if steps that are captured for a draft's head give no hidden states, or those
    of the target do from then on too."""
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
    from sglang.srt.model_executor.runner.decode_cuda_graph_runner import (
        DecodeCudaGraphRunner,
    )

    given = DecodeCudaGraphRunner.get_spec_info
    monkeypatch.setattr(
        DecodeCudaGraphRunner, "get_spec_info", lambda graphs, num: (graphs, num)
    )
    plain = DecodeCudaGraphRunner.get_spec_info
    graphs = SimpleNamespace(capture_hidden_mode=CaptureHiddenMode.NULL)
    with pytest.raises(RuntimeError), shown_by_steps():
        assert DecodeCudaGraphRunner.get_spec_info(graphs, 4) == (graphs, 4)
        assert graphs.capture_hidden_mode == CaptureHiddenMode.LAST
        raise RuntimeError
    assert DecodeCudaGraphRunner.get_spec_info is plain is not given


def test_eager_inputs_pass_through_once_and_for_all(monkeypatch):
    """Red if a pass with more sequences than requests is copied into SGLang's buffers,
    also where the user's environment says otherwise."""
    from sglang.srt.environ import envs

    monkeypatch.setenv("SGLANG_EAGER_INPUT_NO_COPY", "0")
    pass_eager_inputs_through()
    assert envs.SGLANG_EAGER_INPUT_NO_COPY.get() is True
    assert "SGLANG_EAGER_INPUT_NO_COPY" in os.environ


@pytest.mark.parametrize(("device", "waits"), [("cpu", 0), ("cuda", 1)])
def test_models_of_heads_wait_for_a_gpu_that_is_there(monkeypatch, device, waits):
    """Red if a head cannot start on a CPU, or a GPU is not waited for any more."""
    waited = []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: waited.append(1))
    with on_device(device):
        torch.cuda.synchronize()
    assert len(waited) == waits
    torch.cuda.synchronize()
    assert len(waited) == waits + 1
