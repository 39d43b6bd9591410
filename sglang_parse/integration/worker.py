"""ParseWorker: what SGLang calls. `batches.py` runs what it is given."""

from __future__ import annotations

import logging
from functools import partial
from typing import Any

import torch
from sglang.srt.arg_groups.model_override_base import (
    attention_backends_of,
    resolved_view,
)
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_memory, get_parallel
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker, HiCacheDraftPlan
from sglang.srt.utils import get_available_gpu_memory

from sglang_parse.drafting.base import DrafterContext, DrafterResources
from sglang_parse.drafting.registry import create_drafters
from sglang_parse.drafting.runner import DraftRunner
from sglang_parse.engine.client_pass import ClientPass
from sglang_parse.engine.failures import ExtensionErrors, GuardedDrafters
from sglang_parse.engine.outcome import largest_wave
from sglang_parse.engine.prefill import PrefillEngine
from sglang_parse.engine.probing import Probing
from sglang_parse.engine.round import RoundEngine
from sglang_parse.engine.segmenting import Segmenting, padded_texts
from sglang_parse.engine.simulated import (
    pinned_agreement,
    pinned_verdicts,
    remembered_verdicts,
)
from sglang_parse.integration.batches import Batches
from sglang_parse.integration.checks import penalty_sentence
from sglang_parse.integration.ending import refuse
from sglang_parse.integration.extensions import warn_of_broken
from sglang_parse.integration.flags import config_from_server_args
from sglang_parse.integration.hooks import check_hooks
from sglang_parse.integration.probe_pairs import open_collector
from sglang_parse.integration.probes import layers_to_show, read_probe
from sglang_parse.judging.judges import open_judge
from sglang_parse.judging.probe_guard import ProbeGuard
from sglang_parse.judging.segmenter import build_token_texts
from sglang_parse.options.server import ParseConfig, flag_name
from sglang_parse.policy.planner import RoundPlanner
from sglang_parse.reporting import telemetry
from sglang_parse.requests.registry import RequestStates
from sglang_parse.runtime.architecture import check_architecture, has_recurrent_state
from sglang_parse.runtime.capacity import (
    describe_pools,
    full_pass_rows,
    longest_prefill,
    pass_rows,
    warn_of_logits,
)
from sglang_parse.runtime.compat.backends import plan_plain_decode
from sglang_parse.runtime.compat.models import capture_hidden_states
from sglang_parse.runtime.compat.requests import (
    hold,
    release,
)
from sglang_parse.runtime.protocols import SchedulerBatch
from sglang_parse.runtime.ranks import Ranks
from sglang_parse.runtime.slots import RoundSlots
from sglang_parse.runtime.views import batch_view
from sglang_parse.target.model import TargetModel
from sglang_parse.target.passes import TargetVerifier

logger = logging.getLogger(__name__)


class ParseWorker(BaseSpecWorker):
    """SGLang speculative worker for PARSE (contract: base_spec_worker.py)."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: Any
    ) -> None:
        super().__init__()
        check_hooks()
        self.config: ParseConfig = config_from_server_args(server_args)
        self._target_worker = target_worker
        runner = target_worker.model_runner
        model_config = runner.model_config
        check_architecture(
            runner,
            "--model-path",
            # What SGLang has chosen itself is not in the record that it was given.
            backends=attention_backends_of(resolved_view(server_args)),
            head=self.config.compose if self.config.composes else "",
            has_probe=bool(self.config.probe or self.config.probe_collect),
            route=self.config.verify_route,
            brings_back=get_memory().enable_hierarchical_cache,
        )
        if told := penalty_sentence(model_config.get_default_sampling_params()):
            logger.warning(told)
        self.context_len: int = model_config.context_len
        self.ranks = Ranks(get_parallel().tp_group)
        is_first_rank = get_parallel().tp_rank == 0
        self.telemetry = telemetry.start(
            self.config,
            server_args,
            is_first_rank=is_first_rank,
            dp_rank=get_parallel().dp_rank,
        )
        self.errors = ExtensionErrors(self.telemetry.add_extension_error)
        warn_of_broken()
        self.verifier = TargetVerifier(
            target_worker, runner.spec_algorithm, self.config.verify_route
        )
        self.drafters = create_drafters(
            DrafterContext(
                config=self.config,
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                target=runner,
                context_len=self.context_len,
                vocab_size=model_config.vocab_size,
                ranks=self.ranks,
                tokenizer=target_worker.tokenizer,
            ),
            self.errors.note,
        )
        self.verifier.shows_features = any(d.reads_features for d in self.drafters)
        self._draft_worker = self._runners[0].worker if self._runners else None
        if self._runners:
            self.draft_parallel_layout = self._runners[0].layout
        tokenizer = target_worker.tokenizer
        texts = padded_texts(build_token_texts(tokenizer), model_config.vocab_size)
        self.segmenting = Segmenting(self.config, texts, self.errors.note)
        self.judge = open_judge(self.config.judge, tokenizer, self.config.verdict_pairs)
        self.probe = read_probe(server_args, self.config)
        if self.probe is not None or self.config.probe_collect:
            layers = layers_to_show(self.probe, model_config.num_hidden_layers)
            flag = "probe" if self.probe is not None else "probe_collect"
            self.verifier.show_layers(layers, flag_name(flag))
        self.collector = open_collector(
            server_args, self.config, self.probe, self.judge, model_config
        )
        self.requests = RequestStates(
            self.config,
            tokenizer,
            frozenset(model_config.hf_eos_token_id or ()),
            self.judge.ask,
            has_draft_model=any(not d.token_level for d in self.drafters),
            has_token_level=any(d.token_level for d in self.drafters),
            refuse=refuse,
            probe=self.probe,
            has_recurrent_state=has_recurrent_state(runner),
        )
        self.telemetry.held = self.requests.count
        asked = self.judge.ask(self.config.judge_suffix)
        logger.info("PARSE: %s; the judge asks %s", self.config, asked)

    # -- SGLang lifecycle ------------------------------------------------------

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        for runner in self._runners:
            runner.alloc_memory_pool(
                memory_pool_config=memory_pool_config,
                req_to_token_pool=req_to_token_pool,
                token_to_kv_pool_allocator=token_to_kv_pool_allocator,
            )
        runner = self.verifier.runner
        free_gb = get_available_gpu_memory(
            runner.device, runner.gpu_id, empty_cache=False
        )
        self.slots = RoundSlots(
            req_to_token_pool,
            token_to_kv_pool_allocator,
            max_rows=self.ranks.agree(
                pass_rows(runner, req_to_token_pool, int(free_gb * (1 << 30)))
            ),
            brings_back=get_memory().enable_hierarchical_cache,
        )
        self._open_drafters(num_requests=req_to_token_pool.size)
        self._build_engine()
        free_gb = get_available_gpu_memory(
            runner.device, runner.gpu_id, empty_cache=False
        )
        warn_of_logits(
            num_rows=largest_wave(req_to_token_pool.size),
            vocab_size=runner.model_config.vocab_size,
            free_bytes=int(free_gb * (1 << 30)),
        )
        logger.info(
            describe_pools(
                target_pool=self.verifier.runner.token_to_kv_pool,
                draft_pools=[r.runner.token_to_kv_pool for r in self._runners],
                window=self.config.window,
                max_judge_tokens=self._max_judge_tokens,
            )
        )

    @property
    def _max_judge_tokens(self) -> int:
        """Judge suffix tokens of one request in one pass."""
        suffix = self.judge.ask(self.config.judge_suffix).suffix
        return self.config.max_segments * len(suffix)

    def _open_drafters(self, *, num_requests: int) -> None:
        judges = any(not d.token_level for d in self.drafters)
        longest = max((d.max_tokens for d in self.drafters), default=0)
        most = min(self.slots.num_slots, self.slots.max_rows)
        rows = full_pass_rows(
            num_requests=num_requests,
            window=self.config.window if judges else longest,
            max_judge_tokens=self._max_judge_tokens if judges else 0,
            most=most,
        )
        resources = DrafterResources(
            slots=self.slots,
            num_slots=self.slots.last_slot,
            features_of=None
            if has_recurrent_state(self.verifier.runner)
            else self.verifier.features_of,
            full_pass_rows=rows,
            runs_ahead=self._device_runs_beside,
        )
        for drafter in self.drafters:
            drafter.open(resources)

    def _build_engine(self) -> None:
        """The round, on top of models, pools and drafters."""
        target = TargetModel(
            self.verifier, self.slots, runs_ahead=self._device_runs_beside
        )
        count = partial(self.telemetry.add_extension_error, "drafter")
        guarded = GuardedDrafters(self.drafters, count)
        planner = RoundPlanner(
            self.config,
            self.ranks,
            self.slots,
            self.drafters,
            context_len=self.context_len,
            runs_ahead=self._device_runs_beside,
        )
        engine = RoundEngine(
            target=target,
            slots=self.slots,
            drafters=guarded,
            planner=planner,
            segmenting=self.segmenting,
            ranks=self.ranks,
            judge=self.judge.scores,
            on_error=self.errors.note,
            pinned_verdicts=pinned_verdicts(),
            pinned_agreement=pinned_agreement(),
            remembered=remembered_verdicts(),
            probing=self._probing(target),
        )
        client_pass = ClientPass(
            engine,
            context_len=self.context_len,
            view=batch_view,
            refuse=refuse,
            hold=hold,
            release=release,
            step_rows=longest_prefill(),
        )
        self.batches = Batches(
            engine,
            prefills=PrefillEngine(
                target=target,
                drafters=guarded,
                client_pass=client_pass,
                brings_back=self.slots.brings_back,
            ),
            client_pass=client_pass,
            requests=self.requests,
            telemetry=self.telemetry,
        )

    @property
    def _device_runs_beside(self) -> bool:
        """Whether a step may run while the scheduler works. A hierarchical cache brings
        KV into slots that were freed just now, beside what the step writes."""
        on_host = torch.device(self.verifier.runner.device).type == "cpu"
        return not (on_host or self.slots.brings_back)

    def _probing(self, target: TargetModel) -> Probing | None:
        """Verdicts from hidden states, None where nobody reads these."""
        if self.probe is None and self.collector is None:
            return None
        config, guard = self.config, None
        if self.probe is not None and config.probe_check:
            guard = ProbeGuard(share=config.probe_check, least=config.probe_agreement)
            self.telemetry.guard = guard
        return Probing(
            self.probe,
            target=target,
            slots=self.slots,
            ranks=self.ranks,
            view=batch_view,
            judge=self.judge.scores,
            guard=guard,
            collector=self.collector,
            question=config.judge_suffix,
            on_error=self.errors.note,
        )

    def init_attention_backends(self) -> None:
        plan_plain_decode(self.verifier.runner)
        capture_hidden_states(self.verifier.runner)
        for runner in self._runners:
            runner.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        for runner in self._runners:
            runner.init_cuda_graphs()

    def weight_update_runners(self) -> list[tuple[str, ModelRunner]]:
        """None: an update brings the target's weights, which SGLang would load into
        what drafts as well."""
        return []

    def _build_hicache_draft_plan(self) -> HiCacheDraftPlan:
        """Nothing of the draft model's KV: it reads again what is brought back."""
        runner = self.verifier.runner
        runner.mtp_draft_device_pools = runner.mtp_draft_mamba_pools = ()
        return HiCacheDraftPlan()

    def _draft_model_runners(self) -> tuple[ModelRunner, ...]:
        return tuple(r.runner for r in self._runners)

    @property
    def _runners(self) -> list[DraftRunner]:
        """Models that draft; the draft model first, as SGLang expects it."""
        return [r for drafter in reversed(self.drafters) for r in drafter.runners]

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        runners = (self.verifier.runner, *self._draft_model_runners())
        return tuple(r.attn_backend for r in runners)

    # -- Batches ---------------------------------------------------------------

    def forward_batch_generation(
        self, batch: SchedulerBatch, on_publish: Any = None, **_: Any
    ) -> GenerationBatchResult:
        """One prefill or one PARSE round (contract: managers/scheduler.py)."""
        if batch.forward_mode.is_extend():
            return self.batches.prefill(batch)
        return self.batches.decode(batch)
