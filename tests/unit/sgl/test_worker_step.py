"""A whole step of the worker on a pretended GPU, from SGLang's batch to its result.

SGLang's own code plans latent attention, and there are two ranks.
"""

from __future__ import annotations

import importlib
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.managers.schedule_batch import ScheduleBatch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from sglang_parse.drafting.model_drafter import ModelMemory
from sglang_parse.options.server import ParseConfig
from sglang_parse.plugin.batches import Batches
from sglang_parse.plugin.worker import ParseWorker
from sglang_parse.sgl.ranks import Ranks
from tests.contract.test_backend_matrix import flashinfer_mla
from tests.support.device_trace import HostWaits
from tests.unit.sgl.test_host_waits import (
    BUDGET,
    SEQ_LEN,
    Worker,
    drawn,
    hinted,
    made_of_one_letter,
    make_engine,
    make_round,
    sampled,  # noqa: F401
    schedule_batch,
    waits,  # noqa: F401
)

MLA = "sglang.srt.layers.attention.flashinfer_mla_backend"


class Wrapper:
    """Plans a pass with latent attention: the host reads its offsets and lengths
    (flashinfer/mla/_batch_mla/_planning.py)."""

    def __init__(self) -> None:
        self.planned: list[int] = []

    def plan(self, qo_indptr, kv_indptr, kv_indices, kv_lens, *shape) -> None:
        assert kv_indices.device.type == "cuda" and kv_indices.dtype == torch.int32
        assert len(qo_indptr) == len(kv_indptr) == len(kv_lens) + 1
        for array in (qo_indptr, kv_indptr, kv_lens):
            array.to("cpu")
        self.planned.append(len(kv_lens))


class Latent(Worker):
    """A target with latent attention: SGLang's backend plans each pass."""

    def __init__(self) -> None:
        backend, module = flashinfer_mla(), importlib.import_module(MLA)
        updater = module.FlashInferMLAIndicesUpdaterPrefill.__new__(
            module.FlashInferMLAIndicesUpdaterPrefill
        )
        vars(updater).update(
            attn_backend=backend,
            num_local_heads=2,
            kv_lora_rank=4,
            qk_rope_head_dim=4,
            scaling=1.0,
            q_data_type=torch.bfloat16,
            data_type=torch.bfloat16,
            kv_indptr=torch.zeros(9, dtype=torch.int32, device="cuda"),
            qo_indptr=torch.zeros(9, dtype=torch.int32, device="cuda"),
            prefill_wrapper_ragged=None,
        )
        backend.indices_updater_prefill = updater
        backend.prefill_wrapper_verify = self.wrapper = Wrapper()
        backend.kv_index_translator = None
        self.backend = backend

    def forward_batch_generation(self, *, batch, forward_batch, is_verify):
        self.backend.init_forward_metadata(forward_batch)
        assert self.backend.forward_metadata.prefill_wrapper is self.wrapper
        return super().forward_batch_generation(
            batch=batch, forward_batch=forward_batch, is_verify=is_verify
        )


@pytest.fixture
def two_ranks():
    """The first of two ranks; the other one is pretended."""
    torch.distributed.init_process_group(
        "fake", rank=0, world_size=2, store=FakeStore()
    )
    group = SimpleNamespace(world_size=2, rank_in_group=0, ranks=[0, 1], cpu_group=None)
    yield Ranks(group)
    torch.distributed.destroy_process_group()


def scheduled(
    num: int, num_new: int, config: ParseConfig, rule: Any = None
) -> ScheduleBatch:
    """SGLang's batch of `num` requests, of which `num_new` have just joined, with a
    temperature and a bias each. rule: the grammar of all."""
    records = make_round(num, config).requests
    running, newcomers = (
        schedule_batch(first, size)
        for first, size in ((0, num - num_new), (num - num_new, num_new))
    )
    if num_new:
        running.merge_batch(newcomers)
    for r, params in zip(records, running.reqs, strict=True):
        vars(r.req).update(
            sampling_logprobs_mode=None,
            rid="r",
            state=r.state,
            finished=lambda: False,
            session=None,
            mamba_pool_idx=None,
            grammar=rule.copy() if rule else None,
        )
        r.req.sampling_params.temperature = params.sampling_params.temperature
    running.reqs = [r.req for r in records]
    running.forward_mode = ForwardMode.DECODE
    running.tree_cache = SimpleNamespace(evictable_size=lambda: 0)
    running.return_logprob = running.return_hidden_states = False
    return running


def step(
    num: int,
    trace: HostWaits,
    ranks: Ranks,
    *,
    num_new: int = 0,
    rule: Any = None,
    **options: Any,
) -> tuple[GenerationBatchResult, list[int]]:
    """The result of one step, and how many sequences each pass had. rule: the grammar
    of all requests. options: of the server."""
    config = ParseConfig(segmenter="fixed:16", window=64, adaptive=False, **options)
    trace.counts.clear()
    with trace, torch.no_grad():
        engine, drafter = make_engine(config)
        engine.ranks = engine.planner.ranks = ranks
        verifier = engine.target.verifier
        verifier.target_worker = target = Latent()
        verifier.runner.sampler = drawn
        if not config.composes:
            drafter.model.runner.sampler = drawn
        batch = scheduled(num, num_new, config, rule)
        for req in batch.reqs[: num - num_new]:
            memory = ModelMemory(SEQ_LEN, SEQ_LEN)
            drafter._memory[req.state] = hinted() if config.composes else memory
        worker = ParseWorker.__new__(ParseWorker)
        worker.parts = SimpleNamespace(
            verifier=verifier,
            ranks=ranks,
            server_args=SimpleNamespace(enable_memory_saver=False),
        )
        worker.batches = Batches(
            engine,
            prefills=None,
            client_pass=None,
            requests=SimpleNamespace(of=lambda req: req.state),
            telemetry=SimpleNamespace(count=lambda *_: None),
        )
        assert trace.total == 0
        result = worker.forward_batch_generation(batch)
    return result, target.wrapper.planned


@pytest.mark.parametrize("composed", [False, True])
def test_a_step_with_latent_attention_and_two_ranks(
    composed,
    waits,  # noqa: F811
    sampled,  # noqa: F811
    two_ranks,
):
    """Red if a step of the worker mixes tensors of the host with the device's, waits
    for each request, or plans a pass with latent attention otherwise than SGLang's
    backend can."""
    options: dict[str, Any] = {}
    if composed:
        options = {"mode": "exact", "compose": "eagle3", "eagle_model_path": "/head"}
    found = {}
    for num, num_new in ((1, 0), (8, 0), (8, 3), (32, 0)):
        result, planned = step(num, waits, two_ranks, num_new=num_new, **options)
        found[num, num_new] = dict(waits.counts)
        assert result.next_token_ids.device.type == "cpu"
        assert len(result.accept_lens) == num
        (num_sequences,) = planned
        assert num_sequences >= (num if composed else 2 * num)
    assert found[1, 0] == found[8, 0] == found[32, 0]
    assert 0 < sum(found[8, 3].values()) <= BUDGET, found


def test_a_step_under_a_grammar_waits_for_no_request(
    waits,  # noqa: F811
    sampled,  # noqa: F811
    two_ranks,
    monkeypatch,
):
    """Red if a grammar beside latent attention and two ranks makes the host wait for
    each request, or no draft is written under it."""
    rule = made_of_one_letter()
    monkeypatch.setattr(type(rule), "apply_vocab_mask", lambda *_, **__: None)
    found = {}
    for num, num_new in ((1, 0), (8, 0), (8, 3)):
        result, planned = step(
            num, waits, two_ranks, num_new=num_new, rule=rule, mode="exact"
        )
        found[num, num_new] = dict(waits.counts)
        assert len(planned) == 1 and (result.cap_lens > 0).all()
    assert found[1, 0] == found[8, 0]
    assert 0 < sum(found[8, 3].values()) <= 2 * BUDGET, found
