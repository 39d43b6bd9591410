"""What SGLang's scheduler asks of a speculative worker, and what it gives."""

import dataclasses
import inspect
from types import SimpleNamespace

import pytest

from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from tests.support.signatures import parameters

pytestmark = pytest.mark.usefixtures("plugins")


def test_worker_implements_what_its_base_leaves_abstract():
    """Red if BaseSpecWorker gains an abstract method."""
    from sglang_parse.plugin.worker import ParseWorker

    assert not ParseWorker.__abstractmethods__


@pytest.mark.contract_source
def test_worker_base_methods_we_override_exist():
    """Red if an override is called no longer."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

    for name in (
        *("alloc_memory_pool", "init_attention_backends", "init_cuda_graphs"),
        *("weight_update_runners", "_draft_model_runners", "spec_v2_attn_backends"),
        "clear_cache_pool",
    ):
        assert hasattr(BaseSpecWorker, name), name
    flush = inspect.getsource(Scheduler.flush_cache)
    assert "self.draft_worker.clear_cache_pool()" in flush


@pytest.mark.contract_source
def test_scheduler_says_who_waits_and_for_how_many_there_is_room():
    """Red if rounds can no longer be shortened for those that wait."""
    from sglang.srt.managers.scheduler import Scheduler

    assert parameters(Scheduler.run_batch)[:2] == ["self", "batch"]
    assert parameters(Scheduler.get_num_allocatable_reqs)[:2] == ["self", "running_bs"]
    assert "self.waiting_queue" in inspect.getsource(Scheduler)


def test_request_is_hashable_by_identity():
    """Red if Req defines equality: states are keyed by the request object."""
    from sglang.srt.managers.schedule_batch import Req

    assert Req.__hash__ is object.__hash__
    assert Req.__eq__ is object.__eq__


def test_batch_result_fields_we_fill_exist():
    """Red if the scheduler's result record loses a field."""
    from sglang.srt.managers.utils import GenerationBatchResult

    names = {f.name for f in dataclasses.fields(GenerationBatchResult)}
    assert names >= {
        *("logits_output", "next_token_ids", "accept_lens", "cap_lens"),
        *("speculative_output_stride", "new_seq_lens", "next_draft_input"),
        "can_run_cuda_graph",
    }


def test_the_scheduler_waits_for_a_round_only_where_we_let_it():
    """Red if the scheduler copies lengths back that we keep ourselves (`keep_lens`), or
    waits for a copy that there is none of (`HostResult`)."""
    from sglang.srt.managers.scheduler import Scheduler
    from sglang.srt.managers.scheduler_components.batch_result_processor import (
        SchedulerBatchResultProcessor,
    )
    from sglang.srt.managers.utils import GenerationBatchResult

    run = inspect.getsource(inspect.unwrap(Scheduler.run_batch))
    assert "if new_seq_lens is not None and new_seq_lens is not batch.seq_lens" in run
    assert run.index("new_seq_lens.to(") < run.rindex("batch_result.copy_to_cpu(")
    copy = GenerationBatchResult.copy_to_cpu
    assert parameters(copy) == ["self", "return_logprob", "return_hidden_states"]
    process = SchedulerBatchResultProcessor.process_batch_result_decode
    process = inspect.getsource(inspect.unwrap(process))
    assert process.count("copy_done") == 2
    assert "if result.copy_done is not None:" in process


@pytest.mark.parametrize("is_extend", [True, False])
@pytest.mark.parametrize("saves_memory", [True, False])
def test_nothing_runs_when_memory_may_be_released(monkeypatch, saves_memory, is_extend):
    """Red if a head still writes KV into pools that SGLang unmaps, or if every server
    waits for its device."""
    import torch
    from sglang.srt.managers.scheduler_components import weight_updater

    from sglang_parse.plugin.worker import ParseWorker

    release = inspect.getsource(
        weight_updater.SchedulerWeightUpdaterManager.release_memory_occupation
    )
    assert release.index(".pause(") < release.index("synchronize()")
    done = []

    def run(kind):
        return lambda batch: done.append(kind) or kind

    device = SimpleNamespace(synchronize=lambda: done.append("waited"))
    monkeypatch.setattr(torch, "get_device_module", lambda: device)
    worker = object.__new__(ParseWorker)
    worker.batches = SimpleNamespace(prefill=run("prefill"), decode=run("decode"))
    worker.parts = SimpleNamespace(
        server_args=SimpleNamespace(enable_memory_saver=saves_memory),
        verifier=SimpleNamespace(paths=SimpleNamespace(sync=lambda ranks: None)),
        ranks=None,
    )
    batch = SimpleNamespace(forward_mode=SimpleNamespace(is_extend=lambda: is_extend))
    result = worker.forward_batch_generation(batch)
    assert result == ("prefill" if is_extend else "decode")
    assert done == [result, *["waited"] * saves_memory]


@pytest.mark.contract_source
def test_prefill_batch_names_its_unfinished_request():
    """Red if a client's text could be judged before its prompt is whole."""
    from sglang.srt.managers.schedule_batch import FINISH_ABORT, ScheduleBatch

    assert "chunked_req" in {f.name for f in dataclasses.fields(ScheduleBatch)}
    wanted = ["self", "message", "status_code", "err_type"]
    assert parameters(FINISH_ABORT.__init__) == wanted


def test_a_draft_is_quantised_by_its_own_flag():
    """Red if `--speculative-draft-model-quantization` no longer reaches the draft, or
    reaches the target."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.server_args import ServerArgs

    args = ServerArgs(
        model_path=str(TARGET_PATH),
        speculative_draft_model_path=str(DRAFT_PATH),
        speculative_draft_model_quantization="fp8",
        device="cpu",
    )
    found = [
        ModelConfig.from_server_args(args, str(path), is_draft_model=of_draft)
        for path, of_draft in ((TARGET_PATH, False), (DRAFT_PATH, True))
    ]
    assert [one.quantization for one in found] == [None, "fp8"]
