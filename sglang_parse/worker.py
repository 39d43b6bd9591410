"""ParseWorker: calls the stages in order and owns all state; holds no maths."""

from __future__ import annotations

import dataclasses
import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_parse import telemetry
from sglang_parse.client_pass import ClientJudge
from sglang_parse.commit import ParseDraftInput, SampledRows, build_result
from sglang_parse.config import ParseConfig
from sglang_parse.decide import Decision
from sglang_parse.draft import DraftModel
from sglang_parse.draft_cache import DraftCache
from sglang_parse.draft_runner import DraftRunner, plan_plain_decode
from sglang_parse.drafters import (
    Drafter,
    FollowUp,
    HeadDrafter,
    ModelDrafter,
    Turn,
    pending_drafts,
)
from sglang_parse.eagle import EagleHead
from sglang_parse.flags import config_from_server_args
from sglang_parse.grammar import GrammarChain, mask_for_rows
from sglang_parse.hooks import check_hooks
from sglang_parse.memory import (
    RoundSlots,
    describe_pools,
    full_pass_rows,
    longest_pass,
)
from sglang_parse.metrics import RoundRecord
from sglang_parse.pace import RoundTiming
from sglang_parse.plan import build_verify_plan
from sglang_parse.ranks import Ranks
from sglang_parse.request_states import RequestStates
from sglang_parse.sampling import expand_rows, sample_rows
from sglang_parse.stages import (
    TargetStages,
    choose_cuts,
    logprob_needs,
    shown_tokens,
)
from sglang_parse.startup import check_architecture, penalty_sentence
from sglang_parse.state import RequestState, RoundDraft
from sglang_parse.turns import TurnPlanner
from sglang_parse.verify import PassOutput, TargetVerifier

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
        model_config = target_worker.model_runner.model_config
        check_architecture(target_worker.model_runner, "--model-path")
        if told := penalty_sentence(model_config.get_default_sampling_params()):
            logger.warning(told)
        self.context_len: int = model_config.context_len
        self.verifier = TargetVerifier(
            target_worker,
            target_worker.model_runner.spec_algorithm,
            self.config.verify_route,
        )
        self.draft: DraftModel | None = None
        if server_args.speculative_draft_model_path:
            self.draft = DraftModel(
                server_args,
                gpu_id,
                nccl_port,
                self.context_len,
                vocab_size=model_config.vocab_size,
            )
        self.head: EagleHead | None = None
        if self.config.composes:
            self.head = EagleHead(
                server_args,
                gpu_id,
                nccl_port,
                self.context_len,
                path=self.config.eagle_model_path,
                target=target_worker.model_runner,
            )
            self.verifier.shows_features = True
        first = self.draft or self.head
        self._draft_worker = first.worker if first else None
        if first:
            self.draft_parallel_layout = first.layout
        self.ranks = Ranks(get_parallel().tp_group)
        self.telemetry = telemetry.start(
            self.config, server_args, is_first_rank=get_parallel().tp_rank == 0
        )
        self.stages = TargetStages(
            self.config,
            self.verifier,
            target_worker.tokenizer,
            model_config.vocab_size,
        )
        self.requests = RequestStates(
            self.config,
            target_worker.tokenizer,
            frozenset(model_config.hf_eos_token_id or ()),
            self.stages.judge,
            has_draft_model=self.draft is not None,
            has_head=self.head is not None,
        )
        judge = self.stages.judge(self.config.judge_suffix)
        logger.info(
            "PARSE: %s; judge suffix of %d tokens, verdict tokens %s",
            self.config,
            len(judge.suffix),
            judge.verdict_ids,
        )

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
        self.slots = RoundSlots(
            req_to_token_pool,
            token_to_kv_pool_allocator,
            max_rows=longest_pass(),
        )
        self.stages.slots = self.slots
        num_slots, device = token_to_kv_pool_allocator.size, self.slots.table.device
        self.model_drafter = self.head_drafter = None
        if self.draft:
            cache = DraftCache(num_slots, device)
            self.model_drafter = ModelDrafter(self.draft, self.slots, cache)
        if self.head:
            cache = DraftCache(num_slots, device)
            self.head_drafter = HeadDrafter(
                self.head, self.slots, cache, self.verifier.features_of, self.ranks
            )
        self.drafters: list[Drafter] = [
            d for d in (self.head_drafter, self.model_drafter) if d is not None
        ]
        self.planner = TurnPlanner(
            self.config,
            self.ranks,
            self.slots,
            context_len=self.context_len,
            has_model=self.draft is not None,
            head_steps=self.config.eagle_steps if self.head else 0,
        )
        self.client_judge = ClientJudge(self.stages, self.ranks, self.context_len)
        judge = self.stages.judge(self.config.judge_suffix)
        max_judge_tokens = self.config.max_segments * len(judge.suffix)
        if self.head:
            judges = self.draft is not None
            self.head.check_room(
                full_pass_rows(
                    num_requests=req_to_token_pool.size,
                    window=self.config.window if judges else self.config.eagle_steps,
                    max_judge_tokens=max_judge_tokens if judges else 0,
                    most=min(num_slots, self.slots.max_rows),
                )
            )
        logger.info(
            describe_pools(
                target_pool=self.verifier.runner.token_to_kv_pool,
                draft_pools=[r.runner.token_to_kv_pool for r in self._runners],
                window=self.config.window,
                max_judge_tokens=max_judge_tokens,
            )
        )

    def init_attention_backends(self) -> None:
        plan_plain_decode(self.verifier.runner)
        for runner in self._runners:
            runner.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        for runner in self._runners:
            runner.init_cuda_graphs()

    def weight_update_runners(self) -> list[tuple[str, ModelRunner]]:
        """None: an update brings the target's weights, which SGLang would load into
        what drafts as well."""
        return []

    def _draft_model_runners(self) -> tuple[ModelRunner, ...]:
        return tuple(r.runner for r in self._runners)

    @property
    def _runners(self) -> list[DraftRunner]:
        return [r for r in (self.draft, self.head) if r is not None]

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        runners = (self.verifier.runner, *self._draft_model_runners())
        return tuple(r.attn_backend for r in runners)

    # -- Rounds ----------------------------------------------------------------

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, **_: Any
    ) -> GenerationBatchResult:
        """One prefill or one PARSE round (contract: managers/scheduler.py)."""
        if batch.forward_mode.is_extend():
            return self._prefill(batch)
        return self._round(batch)

    def _prefill(self, batch: Any) -> GenerationBatchResult:
        """Target prefill; the draft model catches up when it first drafts."""
        for req in batch.reqs:
            self.requests.forget(req)
        states = [
            None if req is batch.chunked_req else self.requests.of(req)
            for req in batch.reqs
        ]
        judged = [
            i
            for i, (req, state) in enumerate(zip(batch.reqs, states, strict=True))
            if state is not None and state.awaits_judgement(req)
        ]
        if self.model_drafter:
            self.model_drafter.cache.forget(batch.out_cache_loc)
        whole = self.head_drafter.fill_gaps(batch) if self.head_drafter else []
        for state, is_whole in zip(states, whole, strict=False):
            if state is not None and not is_whole:
                state.leave_head_out()
        # A judged text's pass begins with the prompt's last token.
        needed = (
            len(judged) < len(states)
            or any(n > 1 for n in batch.extend_lens)
            or batch.return_logprob
            or batch.return_hidden_states
        )
        result, features = self.verifier.prefill(batch, needed=needed)
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = ParseDraftInput()
        judged_ups = self.client_judge.judge(
            batch, judged, [states[i] for i in judged], result.next_token_ids
        )
        if self.model_drafter:
            self.model_drafter.follow_client(judged_ups)
        if self.head_drafter:
            if features is not None:
                self.head_drafter.follow_prefill(
                    batch, states, features, result.next_token_ids, whole
                )
            self.head_drafter.follow(judged_ups)
        return result

    def _round(self, batch: Any) -> GenerationBatchResult:
        """draft -> segment -> plan -> one target forward -> decide -> commit."""
        states = [self.requests.of(req) for req in batch.reqs]
        # KV of decided tokens that the output does not hold yet is in place.
        seq_lens = [
            n + len(s.ready)
            for n, s in zip(batch.seq_lens_cpu.tolist(), states, strict=True)
        ]
        for req, state in zip(batch.reqs, states, strict=True):
            if state.client is not None:
                state.follow_client([*req.output_ids, *state.ready])
        chains = self._grammar_chains(batch)
        started = time.perf_counter()
        turn = self.planner.plan(batch, states, seq_lens, chains)
        drafts = self._draft(turn)
        drafted = time.perf_counter()
        if not any(d.tokens for d in drafts):
            return self._plain_round(turn, drafts, draft_s=drafted - started)
        segments = self.stages.segment(
            batch, states, drafts, judged=turn.judged, judge_every=turn.judge_every
        )
        boundaries, head_ends = segments.boundaries, segments.head_ends
        plan = build_verify_plan(
            seq_lens=seq_lens,
            bonus_tokens=bonus_tokens(batch, states),
            draft_tokens=shown_tokens(drafts, boundaries),
            boundaries=boundaries,
            suffix_tokens=[s.suffix for s in states],
        )
        planned = time.perf_counter()
        output = self.stages.verify(batch, plan)
        scores = self.ranks.agree_all(self.stages.scores(plan, output, states))
        scored = time.perf_counter()
        cuts = choose_cuts(plan, scores, states, drafts, head_ends)
        decisions, sampled = self.stages.follow_target(
            batch, plan, output, cuts, drafts, chains
        )
        for req, state, cut, decision in zip(
            batch.reqs, states, cuts, decisions, strict=True
        ):
            state.recovering = self.stages.segments_to_recover(
                req, state, decision, rejected=cut.failed_at_verdict(decision)
            )
        self._remember(turn, drafts, decisions)
        self.planner.adapt(turn, drafts, cuts, decisions)
        if self.head_drafter:
            self.head_drafter.follow(
                follow_ups(turn, decisions, output, plan.root_rows)
            )
        ended = time.perf_counter()
        self.telemetry.add_seconds(
            draft=drafted - started, verify=scored - drafted, decide=ended - scored
        )
        timing = RoundTiming(
            bs=len(states),
            num_steps=max(d.num_new for d in drafts),
            num_emitted=sum(len(d.accept_tokens) for d in decisions),
            draft_ms=1000 * (drafted - started),
            verify_ms=1000 * (ended - drafted),
            segment_len=segments.mean_len,
            judged=turn.judged,
            num_rows=plan.num_verify_tokens if plan.num_suffix_tokens else 0,
            pass_ms=1000 * (scored - planned),
        )
        logger.debug("PARSE round: %s", timing)
        self.planner.observe(turn, drafts, timing)
        for i, (req, state) in enumerate(zip(batch.reqs, states, strict=True)):
            state.report.record(
                RoundRecord(
                    output_len=len(req.output_ids) + len(state.ready),
                    accept_tokens=decisions[i].accept_tokens,
                    draft_tokens=drafts[i].tokens,
                    num_new=drafts[i].num_new,
                    num_client=drafts[i].num_client,
                    boundaries=boundaries[i],
                    scores=scores[i],
                    num_eagle=drafts[i].num_head,
                    num_head=head_ends[i],
                    num_judged=decisions[i].num_judged,
                    num_matched=decisions[i].num_matched,
                )
            )
        # Tokens decided ahead are emitted now, and were drafted once.
        proposed = [
            len(d.tokens) + len(s.ready) for d, s in zip(drafts, states, strict=True)
        ]
        return build_result(
            [release_ready(s, d) for s, d in zip(states, decisions, strict=True)],
            seq_lens=batch.seq_lens,
            num_draft_tokens=proposed,
            sampled=sampled,
            return_logprob=batch.return_logprob,
            return_hidden_states=batch.return_hidden_states,
        )

    def _plain_round(
        self, turn: Turn, drafts: Sequence[RoundDraft], *, draft_s: float
    ) -> GenerationBatchResult:
        """No draft has a token: one each, by the target's ordinary decode step.

        draft_s: seconds that drafters took to say so.
        """
        started = time.perf_counter()
        batch, states = turn.batch, turn.states
        bs = len(states)
        device = batch.seq_lens.device
        lens = torch.tensor(turn.seq_lens)
        output = self.verifier.decode(
            input_ids=torch.tensor(bonus_tokens(batch, states), device=device),
            req_pool_indices=batch.req_pool_indices,
            seq_lens=lens.to(device),
            seq_lens_cpu=lens,
            table=self.slots.table,
            return_hidden_states=batch.return_hidden_states,
        )
        index = list(range(bs))
        tokens, sampled = sample_rows(
            self.verifier.runner,
            output.logits,
            sampling_info=expand_rows(batch.sampling_info, index, device),
            positions=lens.to(device),
            grammar_mask=mask_for_rows(turn.chains, index, [0] * bs),
            needs=logprob_needs(batch, index),
        )
        decisions = [Decision((token,), 0, 0, ()) for token in tokens.tolist()]
        for state in states:
            state.pending, state.pending_ended, state.num_client = (), False, 0
        if self.model_drafter:
            self.model_drafter.follow_plain(turn, drafts)
        if self.head_drafter:
            self.head_drafter.follow(follow_ups(turn, decisions, output, index))
        self.slots.trim_rows(batch, [n + 1 for n in turn.seq_lens])
        plain_s = time.perf_counter() - started
        self.telemetry.add_seconds(draft=draft_s, plain=plain_s)
        self.planner.observe_plain(bs, 1000 * plain_s)
        for req, state, decision in zip(batch.reqs, states, decisions, strict=True):
            state.follow_verdict(1, 0)
            state.recovering = self.stages.segments_to_recover(
                req, state, decision, rejected=False
            )
            output_len = len(req.output_ids) + len(state.ready)
            state.report.record(RoundRecord(output_len, decision.accept_tokens))
        proposed = [len(s.ready) for s in states]
        return build_result(
            [release_ready(s, d) for s, d in zip(states, decisions, strict=True)],
            seq_lens=batch.seq_lens,
            num_draft_tokens=proposed,
            sampled=SampledRows(
                [[i] for i in index], sampled, output.hidden_states, index
            ),
            return_logprob=batch.return_logprob,
            return_hidden_states=batch.return_hidden_states,
        )

    # -- Stages ----------------------------------------------------------------

    def _grammar_chains(self, batch: Any) -> list[GrammarChain | None]:
        vocab_size = batch.sampling_info.vocab_size
        return [
            GrammarChain(req.grammar, vocab_size, batch.device) if req.grammar else None
            for req in batch.reqs
        ]

    def _draft(self, turn: Turn) -> list[RoundDraft]:
        """Every drafter in its turn; what is pending comes first."""
        self.slots.extend_rows(
            turn.batch,
            [n + 1 + w for n, w in zip(turn.seq_lens, turn.windows, strict=True)],
        )
        try:
            drafts = pending_drafts(turn)
            for drafter in self.drafters:
                drafts = drafter.draft(turn, drafts)
        finally:
            for chain in turn.chains:
                if chain is not None:
                    chain.rewind()
        return drafts

    def _remember(
        self,
        turn: Turn,
        drafts: Sequence[RoundDraft],
        decisions: Sequence[Decision],
    ) -> None:
        """Carry pending drafts over to the next round; free unused slots."""
        keep = []
        for i, (state, decision) in enumerate(zip(turn.states, decisions, strict=True)):
            state.pending = decision.pending
            state.pending_ended = bool(decision.pending) and drafts[i].ended
            num_client = drafts[i].num_client - len(decision.accept_tokens)
            state.num_client = max(0, num_client) if decision.pending else 0
            new_len = turn.seq_lens[i] + len(decision.accept_tokens)
            keep.append(new_len + len(decision.pending) + bool(decision.pending))
        if self.model_drafter:
            self.model_drafter.follow(turn, drafts, decisions)
        self.slots.trim_rows(turn.batch, keep)


def follow_ups(
    turn: Turn,
    decisions: Sequence[Decision],
    output: PassOutput,
    root_rows: Sequence[int],
) -> list[FollowUp]:
    """What an EAGLE-3 head follows after a pass; root_rows: the bonus tokens' rows."""
    return [
        FollowUp(
            row,
            state,
            start,
            decision.accept_tokens,
            output.features_at(root, len(decision.accept_tokens)),
        )
        for row, state, start, decision, root in zip(
            turn.batch.req_pool_indices.tolist(),
            turn.states,
            turn.seq_lens,
            decisions,
            root_rows,
            strict=True,
        )
    ]


def bonus_tokens(batch: Any, states: Sequence[RequestState]) -> list[int]:
    """[bs] the last decided token of each request, whose KV is not written yet."""
    return [
        state.ready[-1] if state.ready else req.output_ids[-1]
        for req, state in zip(batch.reqs, states, strict=True)
    ]


def release_ready(state: RequestState, decision: Decision) -> Decision:
    """The decision as it is emitted: tokens decided ahead come first."""
    if not state.ready:
        return decision
    tokens = (*state.ready, *decision.accept_tokens)
    state.ready = ()
    return dataclasses.replace(decision, accept_tokens=tokens)
