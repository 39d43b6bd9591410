"""ParseWorker: calls the stages in order and owns all state; holds no maths."""

from __future__ import annotations

import dataclasses
import logging
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.runtime_context import get_parallel
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from torch import Tensor

from sglang_parse import report, telemetry
from sglang_parse.client import ClientText
from sglang_parse.client_pass import ClientJudge
from sglang_parse.commit import ParseDraftInput, SampledRows, build_result
from sglang_parse.config import ParseConfig
from sglang_parse.decide import (
    Cut,
    Decision,
)
from sglang_parse.draft import DraftModel, DraftRequest, plan_plain_decode
from sglang_parse.draft_cache import DraftCache
from sglang_parse.flags import config_from_server_args
from sglang_parse.grammar import MAX_GRAMMAR_WINDOW, GrammarChain, mask_for_rows
from sglang_parse.hooks import check_hooks
from sglang_parse.memory import RoundSlots, describe_pools
from sglang_parse.metrics import RequestReport, RoundRecord
from sglang_parse.plan import VerifyPlan, build_verify_plan
from sglang_parse.ranks import Ranks
from sglang_parse.request import RequestOptions
from sglang_parse.sampling import expand_rows, sample_rows
from sglang_parse.stages import TargetStages, choose_cuts, logprob_needs
from sglang_parse.startup import check_architecture
from sglang_parse.state import RequestState, RoundDraft, stop_token_ids
from sglang_parse.verify import TargetVerifier
from sglang_parse.window import (
    SHORT_WINDOW,
    RoundTiming,
    WindowController,
    draft_window,
    first_window,
    fit_windows,
    next_window,
)

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
        check_architecture(model_config, "--model-path")
        self.context_len: int = model_config.context_len
        self.verifier = TargetVerifier(
            target_worker,
            target_worker.model_runner.spec_algorithm,
            self.config.verify_route,
        )
        self.tokenizer = target_worker.tokenizer
        self.draft: DraftModel | None = None
        if server_args.speculative_draft_model_path:
            self.draft = DraftModel(server_args, gpu_id, nccl_port, self.context_len)
            self.draft_parallel_layout = self.draft.layout
        self._draft_worker = self.draft.worker if self.draft else None
        self.model_eos_ids = frozenset(model_config.hf_eos_token_id or ())
        self._states: weakref.WeakKeyDictionary[Any, RequestState] = (
            weakref.WeakKeyDictionary()
        )
        self.controller = WindowController(self.config.max_round_ms)
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
        if self.draft:
            self.draft.alloc_memory_pool(
                memory_pool_config=memory_pool_config,
                req_to_token_pool=req_to_token_pool,
                token_to_kv_pool_allocator=token_to_kv_pool_allocator,
            )
        self.slots = RoundSlots(req_to_token_pool, token_to_kv_pool_allocator)
        self.draft_cache = DraftCache(
            token_to_kv_pool_allocator.size, req_to_token_pool.req_to_token.device
        )
        self.stages.slots = self.slots
        self.client_judge = ClientJudge(self.stages, self.draft_cache, self.context_len)
        judge = self.stages.judge(self.config.judge_suffix)
        logger.info(
            describe_pools(
                target_pool=self.verifier.runner.token_to_kv_pool,
                draft_pool=self.draft.runner.token_to_kv_pool if self.draft else None,
                window=self.config.window,
                max_judge_tokens=self.config.max_segments * len(judge.suffix),
            )
        )

    def init_attention_backends(self) -> None:
        plan_plain_decode(self.verifier.runner)
        if self.draft:
            self.draft.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        if self.draft:
            self.draft.init_cuda_graphs()

    def weight_update_runners(self) -> list[tuple[str, ModelRunner]]:
        return [("draft", runner) for runner in self._draft_model_runners()]

    def _draft_model_runners(self) -> tuple[ModelRunner, ...]:
        return (self.draft.runner,) if self.draft else ()

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
        """Target prefill; the draft catches up when it first drafts."""
        self.draft_cache.forget(batch.out_cache_loc)
        whole = [req for req in batch.reqs if req is not batch.chunked_req]
        for req in batch.reqs:
            self._states.pop(req, None)
        result = self.target_worker.forward_batch_generation(batch)
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = ParseDraftInput()
        for req in whole:
            self._state(req)
        judged = [
            i
            for i, req in enumerate(batch.reqs)
            if req in self._states and self._states[req].awaits_judgement(req)
        ]
        if judged:
            self.client_judge.judge(
                batch,
                judged,
                [self._states[batch.reqs[i]] for i in judged],
                result.next_token_ids,
            )
        return result

    def _round(self, batch: Any) -> GenerationBatchResult:
        """draft -> segment -> plan -> one target forward -> decide -> commit."""
        states = [self._state(req) for req in batch.reqs]
        # KV of decided tokens that the output does not hold yet is in place.
        seq_lens = [
            n + len(s.ready)
            for n, s in zip(batch.seq_lens_cpu.tolist(), states, strict=True)
        ]
        chains = self._grammar_chains(batch)
        started = time.perf_counter()
        drafts = self._draft(batch, states, seq_lens, chains)
        drafted = time.perf_counter()
        if not any(d.tokens for d in drafts):
            return self._plain_round(batch, states, chains, seq_lens)
        boundaries = self.stages.segment(batch, states, drafts)
        plan = build_verify_plan(
            seq_lens=seq_lens,
            bonus_tokens=bonus_tokens(batch, states),
            draft_tokens=[d.tokens for d in drafts],
            boundaries=boundaries,
            suffix_tokens=[s.suffix for s in states],
        )
        output = self.stages.verify(batch, plan)
        verified = time.perf_counter()
        scores = self.stages.scores(plan, output, states)
        cuts = choose_cuts(plan, scores, states)
        decisions, sampled = self.stages.follow_target(
            batch, plan, output, cuts, drafts, chains
        )
        self._remember(batch, states, drafts, decisions, seq_lens)
        self._adapt(states, plan, cuts, decisions)
        ended = time.perf_counter()
        self.telemetry.add_seconds(
            draft=drafted - started, verify=verified - drafted, decide=ended - verified
        )
        timing = RoundTiming(
            bs=len(states),
            num_steps=max(d.num_new for d in drafts),
            num_emitted=sum(len(d.accept_tokens) for d in decisions),
            draft_ms=1000 * (drafted - started),
            verify_ms=1000 * (ended - drafted),
            segment_len=mean_segment_len(boundaries),
        )
        logger.debug("PARSE round: %s", timing)
        if timing.num_steps:
            self.controller.observe(timing)
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
                    num_judged=decisions[i].num_judged,
                    num_matched=decisions[i].num_matched,
                )
            )
        return build_result(
            [release_ready(s, d) for s, d in zip(states, decisions, strict=True)],
            seq_lens=batch.seq_lens,
            num_draft_tokens=[len(d.tokens) for d in drafts],
            sampled=sampled,
            return_logprob=batch.return_logprob,
            return_hidden_states=batch.return_hidden_states,
        )

    def _plain_round(
        self,
        batch: Any,
        states: Sequence[RequestState],
        chains: Sequence[GrammarChain | None],
        seq_lens: Sequence[int],
    ) -> GenerationBatchResult:
        """Nobody drafted: one token each, by the target's ordinary decode step."""
        started = time.perf_counter()
        bs = len(states)
        device = batch.seq_lens.device
        lens = torch.tensor(seq_lens)
        logits, hidden_states = self.verifier.decode(
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
            logits,
            sampling_info=expand_rows(batch.sampling_info, index, device),
            positions=lens.to(device),
            grammar_mask=mask_for_rows(chains, index, [0] * bs),
            needs=logprob_needs(batch, index),
        )
        decisions = [Decision((token,), 0, 0, ()) for token in tokens.tolist()]
        self._forget_drafts(batch, states, lens)
        plain_s = time.perf_counter() - started
        self.telemetry.add_seconds(plain=plain_s)
        self.controller.observe(RoundTiming(bs, 0, bs, 0.0, 1000 * plain_s))
        for req, state, decision in zip(batch.reqs, states, decisions, strict=True):
            output_len = len(req.output_ids) + len(state.ready)
            state.report.record(RoundRecord(output_len, decision.accept_tokens))
        return build_result(
            [release_ready(s, d) for s, d in zip(states, decisions, strict=True)],
            seq_lens=batch.seq_lens,
            num_draft_tokens=[0] * bs,
            sampled=SampledRows(index, sampled, hidden_states, index),
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

    def _draft(
        self,
        batch: Any,
        states: Sequence[RequestState],
        seq_lens: Sequence[int],
        chains: Sequence[GrammarChain | None],
    ) -> list[RoundDraft]:
        """Draft for every request that wants to; pending tokens come first."""
        for req, state in zip(batch.reqs, states, strict=True):
            if state.client is not None:
                state.follow_client([*req.output_ids, *state.ready])
        windows = self._windows(batch, states, seq_lens)
        self.slots.extend_rows(
            batch, [n + 1 + w for n, w in zip(seq_lens, windows, strict=True)]
        )
        rows = batch.req_pool_indices.tolist()
        drafts = [
            RoundDraft(
                s.pending[:w],
                s.pending_ended and len(s.pending) <= w,
                num_client=min(w, s.num_client),
            )
            for s, w in zip(states, windows, strict=True)
        ]
        if self.draft is None:
            return drafts
        orders = []
        for i, (req, state) in enumerate(zip(batch.reqs, states, strict=True)):
            num_new = windows[i] - len(drafts[i].tokens)
            if num_new == 0 or drafts[i].ended:
                continue
            tokens = [
                *req.origin_input_ids,
                *req.output_ids,
                *state.ready,
                *drafts[i].tokens,
            ]
            if state.num_cached is None:
                state.num_cached = self.draft_cache.num_leading(
                    self.slots.table[rows[i], : seq_lens[i]]
                )
            orders.append(
                DraftRequest(
                    row=rows[i],
                    tokens=tokens,
                    num_cached=min(state.num_cached, len(tokens) - 1),
                    num_new=num_new,
                    stop_ids=state.stop_ids,
                    batch_index=i,
                    grammar=chains[i],
                )
            )
        if not orders:
            return drafts
        try:
            proposal = self.draft.propose(
                orders, table=self.slots.table, sampling_info=batch.sampling_info
            )
        finally:
            for order in orders:
                if order.grammar is not None:
                    order.grammar.rewind()
        for k, order in enumerate(orders):
            new = proposal.tokens[k]
            drafts[order.batch_index] = RoundDraft(
                tokens=drafts[order.batch_index].tokens + new,
                ended=proposal.ended[k],
                num_new=len(new),
                num_forwarded=proposal.num_forwarded[k],
                num_client=drafts[order.batch_index].num_client,
            )
        return drafts

    def _windows(
        self, batch: Any, states: Sequence[RequestState], seq_lens: Sequence[int]
    ) -> list[int]:
        """Draft tokens each request may hold this round."""
        windows = [
            draft_window(
                state.options.window,
                num_remaining=req.sampling_params.max_new_tokens
                - len(req.output_ids)
                - len(state.ready),
                num_positions=self.context_len - seq_len - 1 - len(state.suffix),
            )
            if state.options.mode != "off"
            and (self.draft or state.pending)
            and not state.is_ending
            else 0
            for req, state, seq_len in zip(batch.reqs, states, seq_lens, strict=True)
        ]
        if self.draft is None:
            windows = [
                min(w, len(s.pending)) for w, s in zip(windows, states, strict=True)
            ]
        if any(s.options.mode == "off" for s in states):
            windows = [min(w, SHORT_WINDOW) for w in windows]
        windows = [
            min(w, MAX_GRAMMAR_WINDOW) if req.grammar else w
            for w, req in zip(windows, batch.reqs, strict=True)
        ]
        if self.config.adaptive and any(windows):
            cap = self.ranks.agree(self.controller.step_cap(len(states)))
            windows = [
                min(w, cap + len(s.pending), s.window or w)
                for w, s in zip(windows, states, strict=True)
            ]
        if not any(windows):
            return windows
        room = self.slots.num_free(batch.tree_cache)
        held = [r.kv.kv_allocated_len for r in batch.reqs]
        return fit_windows(windows, seq_lens=seq_lens, held=held, room=room)

    def _remember(
        self,
        batch: Any,
        states: Sequence[RequestState],
        drafts: Sequence[RoundDraft],
        decisions: Sequence[Decision],
        seq_lens: Sequence[int],
    ) -> None:
        """Carry pending drafts and draft-KV bookkeeping over; free unused slots."""
        rows = batch.req_pool_indices.tolist()
        keep = []
        for i, (state, decision) in enumerate(zip(states, decisions, strict=True)):
            draft = drafts[i]
            new_len = seq_lens[i] + len(decision.accept_tokens)
            state.pending = decision.pending
            state.pending_ended = bool(decision.pending) and draft.ended
            num_client = draft.num_client - len(decision.accept_tokens)
            state.num_client = max(0, num_client) if decision.pending else 0
            if state.num_cached is None:
                first = cached = seq_lens[i]
            else:
                first = min(state.num_cached, seq_lens[i])
                cached = max(state.num_cached, draft.num_forwarded)
                # Where the output left the draft, the draft's KV is of other tokens.
                cached = cached if decision.pending else min(cached, new_len)
                state.num_cached = cached
            self.draft_cache.mark(
                self.slots.table[rows[i], first:new_len], num_valid=cached - first
            )
            keep.append(new_len + len(decision.pending) + bool(decision.pending))
        self.slots.trim_rows(batch, keep)

    def _forget_drafts(
        self, batch: Any, states: Sequence[RequestState], lens: Tensor
    ) -> None:
        """`_remember` after a plain round: nothing pending, no draft KV of the token.

        lens: [bs] int64 on the host, tokens before the round's own.
        """
        written = self.slots.table[batch.req_pool_indices, lens.to(batch.device)]
        self.draft_cache.forget(written)
        seq_lens = lens.tolist()
        for state, n in zip(states, seq_lens, strict=True):
            state.pending, state.pending_ended, state.num_client = (), False, 0
            if state.num_cached is not None:
                state.num_cached = min(state.num_cached, n)
        self.slots.trim_rows(batch, [n + 1 for n in seq_lens])

    def _adapt(
        self,
        states: Sequence[RequestState],
        plan: VerifyPlan,
        cuts: Sequence[Cut],
        decisions: Sequence[Decision],
    ) -> None:
        """Each request's next window, from what became of this one."""
        for i, state in enumerate(states):
            rejected = cuts[i].rejected_end - cuts[i].num_kept
            state.window = next_window(
                state.window,
                num_draft=plan.num_draft_tokens[i] - len(decisions[i].pending),
                num_correct=decisions[i].num_correct_drafts,
                rejected_len=max(0, rejected),
            )

    # -- Per-request set-up ----------------------------------------------------

    def _state(self, req: Any) -> RequestState:
        state = self._states.get(req)
        if state is not None:
            return state
        options = RequestOptions.of(
            req, self.config, has_draft_model=self.draft is not None
        )
        judge = None
        if options.mode == "semantic":
            judge = self.stages.judge(options.judge_suffix)
        client = None
        if options.client_text and options.mode != "off":
            client = ClientText.of(options.client_text, self.tokenizer)
        known = report.report_of(req)
        if known is not None:
            known.finish(req.output_ids)  # tokens decided ahead went with the KV
        state = RequestState(
            options=options,
            stop_ids=stop_token_ids(req, self.model_eos_ids),
            judge=judge,
            report=known
            or RequestReport(
                "verify" if options.verify_only else options.mode,
                options.fallback,
                options.report,
            ),
            window=first_window(options.mode),
            client=client,
        )
        state.report.client = client
        report.attach(req, state.report)
        self._states[req] = state
        return state


def mean_segment_len(boundaries: Sequence[Sequence[int]]) -> float:
    """Tokens a segment, 0 without one."""
    num_tokens = sum(b[-1] for b in boundaries if b)
    return num_tokens / max(1, sum(map(len, boundaries)))


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
