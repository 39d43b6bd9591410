"""ParseWorker: what SGLang calls. `batches.py` runs what it is given."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker, HiCacheDraftPlan

from sglang_parse.plugin.assembly import build_batches, open_parts
from sglang_parse.plugin.hooks import check_hooks
from sglang_parse.proof.prover import prove
from sglang_parse.sgl.compat.backend_changes import plan_plain_decode
from sglang_parse.sgl.scheduler_types import SchedulerBatch


class ParseWorker(BaseSpecWorker):
    """SGLang speculative worker for PARSE (contract: base_spec_worker.py)."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any
    ) -> None:
        super().__init__()
        check_hooks()
        self._target_worker = target_worker
        self.parts = open_parts(server_args, gpu_id, nccl_port, target_worker)
        runners = self.parts.draft_runners
        self._draft_worker = runners[0].worker if runners else None
        if runners:
            self.draft_parallel_layout = runners[0].layout

    # -- SGLang lifecycle ------------------------------------------------------

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        for runner in self.parts.draft_runners:
            runner.alloc_memory_pool(
                memory_pool_config=memory_pool_config,
                req_to_token_pool=req_to_token_pool,
                token_to_kv_pool_allocator=token_to_kv_pool_allocator,
            )
        self.batches = build_batches(
            self.parts, req_to_token_pool, token_to_kv_pool_allocator
        )

    def init_attention_backends(self) -> None:
        plan_plain_decode(self._target_runner, shows_states=True)
        for runner in self.parts.draft_runners:
            runner.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        for runner in self.parts.draft_runners:
            runner.init_cuda_graphs()

    @torch.no_grad()
    def prewarm_sampling(self) -> Any:
        """SGLang calls it once all graphs are captured, on the stream that serves."""
        result = super().prewarm_sampling()
        prove(self.parts, self.batches.engine)
        return result

    def weight_update_runners(self) -> list[tuple[str, ModelRunner]]:
        """The first model that drafts, for updates that name it (`select_runners`)."""
        return [("draft", runner) for runner in self._draft_model_runners()[:1]]

    def clear_cache_pool(self) -> None:
        """The scheduler flushes its caches."""
        for drafter in self.parts.drafters:
            drafter.flush()

    def _build_hicache_draft_plan(self) -> HiCacheDraftPlan:
        """Nothing of the draft model's KV is kept on the host: the draft model reads
        again what is brought back."""
        return HiCacheDraftPlan()

    @property
    def _target_runner(self) -> ModelRunner:
        return self.parts.verifier.runner

    def _draft_model_runners(self) -> tuple[ModelRunner, ...]:
        return tuple(r.runner for r in self.parts.draft_runners)

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        runners = (self._target_runner, *self._draft_model_runners())
        return tuple(r.attn_backend for r in runners)

    # -- Batches ---------------------------------------------------------------

    def forward_batch_generation(
        self, batch: SchedulerBatch, on_publish: Any = None, **_: Any
    ) -> GenerationBatchResult:
        """One prefill or one PARSE round (contract: managers/scheduler.py)."""
        if batch.forward_mode.is_extend():
            result = self.batches.prefill(batch)
        else:
            self.parts.verifier.paths.sync(self.parts.ranks)
            result = self.batches.decode(batch)
        if self.parts.server_args.enable_memory_saver:
            # A draft model may still read behind the last answer, and SGLang unmaps the
            # pools without a wait (weight_updater.py, `release_memory_occupation`).
            torch.get_device_module().synchronize()
        return result
