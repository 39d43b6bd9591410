"""ParseWorker: calls the stages in order and owns all state; holds no maths."""

from __future__ import annotations

import logging
import time
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.model_runner import ModelRunner
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker

from sglang_parse import report
from sglang_parse.commit import ParseDraftInput, SampledRows, build_result
from sglang_parse.config import ParseConfig
from sglang_parse.decide import (
    Cut,
    Decision,
    choose_cut,
    decide,
    exact_cut,
    verdict_scores,
)
from sglang_parse.draft import DraftModel, DraftRequest
from sglang_parse.draft_cache import DraftCache
from sglang_parse.flags import config_from_server_args
from sglang_parse.grammar import MAX_GRAMMAR_WINDOW, GrammarChain, mask_for_rows
from sglang_parse.hooks import check_hooks
from sglang_parse.judge import JudgePrompt, build_judge_prompt
from sglang_parse.memory import RoundSlots
from sglang_parse.metrics import RequestReport
from sglang_parse.plan import VerifyPlan, build_verify_plan
from sglang_parse.request import RequestOptions
from sglang_parse.sampling import LogprobNeeds, expand_rows, sample_rows
from sglang_parse.segment import Segmenter, build_token_texts
from sglang_parse.startup import check_target
from sglang_parse.state import RequestState, RoundDraft, stop_token_ids
from sglang_parse.verify import TargetVerifier, VerifyOutput
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

# Committed text the segmenter sees before the draft.
SEAM_TOKENS = 48


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
        check_target(model_config)
        self.context_len: int = model_config.context_len
        self.verifier = TargetVerifier(
            target_worker, target_worker.model_runner.spec_algorithm
        )
        self.tokenizer = target_worker.tokenizer
        self.draft = DraftModel(server_args, gpu_id, nccl_port, self.context_len)
        self._draft_worker = self.draft.worker
        self.draft_parallel_layout = self.draft.layout
        self.model_eos_ids = frozenset(model_config.hf_eos_token_id or ())
        texts = build_token_texts(self.tokenizer)
        # Model vocabularies are padded beyond the tokenizer's.
        texts += [""] * (model_config.vocab_size - len(texts))
        self._token_texts = texts
        self._segmenters: dict[str, Segmenter] = {}
        self._judges: dict[str, JudgePrompt] = {}
        self._states: weakref.WeakKeyDictionary[Any, RequestState] = (
            weakref.WeakKeyDictionary()
        )
        self.controller = WindowController(self.config.max_round_ms)
        # Fail at start-up, not at the first request.
        self._segmenter(self.config.segmenter)
        judge = self._judge(self.config.judge_suffix)
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
        self.draft.alloc_memory_pool(
            memory_pool_config=memory_pool_config,
            req_to_token_pool=req_to_token_pool,
            token_to_kv_pool_allocator=token_to_kv_pool_allocator,
        )
        self.slots = RoundSlots(req_to_token_pool, token_to_kv_pool_allocator)
        self.draft_cache = DraftCache(
            token_to_kv_pool_allocator.size, req_to_token_pool.req_to_token.device
        )

    def init_attention_backends(self) -> None:
        self.draft.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        self.draft.init_cuda_graphs()

    def weight_update_runners(self) -> list[tuple[str, ModelRunner]]:
        return [("draft", self.draft.runner)]

    def _draft_model_runners(self) -> tuple[ModelRunner, ...]:
        return (self.draft.runner,)

    @property
    def spec_v2_attn_backends(self) -> tuple[Any, ...]:
        runners = (self.verifier.runner, self.draft.runner)
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
        for req in batch.reqs:
            self._states.pop(req, None)
        result = self.target_worker.forward_batch_generation(batch)
        result.new_seq_lens = batch.seq_lens
        result.next_draft_input = ParseDraftInput()
        return result

    def _round(self, batch: Any) -> GenerationBatchResult:
        """draft -> segment -> plan -> one target forward -> decide -> commit."""
        states = [self._state(req) for req in batch.reqs]
        seq_lens = batch.seq_lens_cpu.tolist()
        chains = self._grammar_chains(batch)
        started = time.perf_counter()
        drafts = self._draft(batch, states, seq_lens, chains)
        drafted = time.perf_counter()
        boundaries = self._segment(batch, states, drafts, seq_lens)
        plan = build_verify_plan(
            seq_lens=seq_lens,
            bonus_tokens=[req.output_ids[-1] for req in batch.reqs],
            draft_tokens=[d.tokens for d in drafts],
            boundaries=boundaries,
            suffix_tokens=[s.suffix for s in states],
        )
        scratch = self.slots.take_scratch(batch.tree_cache, plan.num_suffix_tokens)
        try:
            output = self.verifier.verify(
                plan,
                req_pool_indices=batch.req_pool_indices,
                seq_lens=batch.seq_lens,
                scratch=scratch,
                table=self.slots.table,
            )
        finally:
            self.slots.release_scratch(scratch)
        scores = self._scores(plan, output, states)
        cuts = choose_cuts(plan, scores, states)
        decisions, sampled = self._follow_target(
            batch, plan, output, cuts, drafts, chains
        )
        self._remember(batch, states, drafts, decisions, seq_lens)
        self._adapt(states, plan, cuts, decisions)
        timing = RoundTiming(
            bs=len(states),
            num_steps=max(d.num_new for d in drafts),
            num_emitted=sum(len(d.accept_tokens) for d in decisions),
            draft_ms=1000 * (drafted - started),
            verify_ms=1000 * (time.perf_counter() - drafted),
        )
        logger.debug("PARSE round: %s", timing)
        self.controller.observe(timing)
        for i, (req, state) in enumerate(zip(batch.reqs, states, strict=True)):
            state.report.record(
                output_len=len(req.output_ids),
                draft_tokens=drafts[i].tokens,
                num_new_drafts=drafts[i].num_new,
                boundaries=boundaries[i],
                scores=scores[i],
                num_judged=decisions[i].num_judged,
                num_matched=decisions[i].num_matched,
                accept_tokens=decisions[i].accept_tokens,
            )
        return build_result(
            decisions,
            seq_lens=batch.seq_lens,
            num_draft_tokens=[len(d.tokens) for d in drafts],
            sampled=sampled,
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
        windows = self._windows(batch, states, seq_lens)
        self.slots.extend_rows(
            batch, [n + 1 + w for n, w in zip(seq_lens, windows, strict=True)]
        )
        rows = batch.req_pool_indices.tolist()
        drafts = [
            RoundDraft(s.pending[:w], s.pending_ended and len(s.pending) <= w)
            for s, w in zip(states, windows, strict=True)
        ]
        orders = []
        for i, (req, state) in enumerate(zip(batch.reqs, states, strict=True)):
            num_new = windows[i] - len(drafts[i].tokens)
            if num_new == 0 or drafts[i].ended:
                continue
            tokens = [*req.origin_input_ids, *req.output_ids, *drafts[i].tokens]
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
            )
        return drafts

    def _windows(
        self, batch: Any, states: Sequence[RequestState], seq_lens: Sequence[int]
    ) -> list[int]:
        """Draft tokens each request may hold this round."""
        windows = [
            draft_window(
                state.options.window,
                num_remaining=req.sampling_params.max_new_tokens - len(req.output_ids),
                num_positions=self.context_len - seq_len - 1 - len(state.suffix),
            )
            if state.options.mode != "off"
            else 0
            for req, state, seq_len in zip(batch.reqs, states, seq_lens, strict=True)
        ]
        if any(s.options.mode == "off" for s in states):
            windows = [min(w, SHORT_WINDOW) for w in windows]
        windows = [
            min(w, MAX_GRAMMAR_WINDOW) if req.grammar else w
            for w, req in zip(windows, batch.reqs, strict=True)
        ]
        if self.config.adaptive and any(windows):
            cap = self.controller.step_cap(len(states))
            windows = [
                min(w, cap + len(s.pending), s.window or w)
                for w, s in zip(windows, states, strict=True)
            ]
        room = self.slots.num_free(batch.tree_cache)
        held = [r.kv.kv_allocated_len for r in batch.reqs]
        return fit_windows(windows, seq_lens=seq_lens, held=held, room=room)

    def _segment(
        self,
        batch: Any,
        states: Sequence[RequestState],
        drafts: Sequence[RoundDraft],
        seq_lens: Sequence[int],
    ) -> list[tuple[int, ...]]:
        """Boundaries to judge, as many as there are scratch slots for."""
        judged = [
            i
            for i, s in enumerate(states)
            if s.options.mode == "semantic" and drafts[i].tokens
        ]
        boundaries: list[tuple[int, ...]] = [()] * len(states)
        room = self.slots.num_free(batch.tree_cache)
        for num_left, i in zip(range(len(judged), 0, -1), judged, strict=True):
            state = states[i]
            suffix_len = len(state.suffix)
            most = min(self.config.max_segments, room // num_left // suffix_len)
            if most == 0:
                continue
            boundaries[i] = self._segmenter(state.options.segmenter).boundaries(
                drafts[i].tokens,
                ended=drafts[i].ended,
                max_segments=most,
                previous_text=self._seam_text(batch.reqs[i]),
            )
            room -= len(boundaries[i]) * suffix_len
        return boundaries

    def _scores(
        self, plan: VerifyPlan, output: VerifyOutput, states: Sequence[RequestState]
    ) -> list[tuple[float, ...]]:
        """Verdict scores per request, one per boundary."""
        scores: list[tuple[float, ...]] = []
        at = 0
        for state, boundaries in zip(states, plan.boundaries, strict=True):
            logits = output.verdict_logits[at : at + len(boundaries)]
            at += len(boundaries)
            if not boundaries or state.judge is None:
                scores.append(())
                continue
            values = verdict_scores(logits, state.judge.verdict_ids)
            scores.append(tuple(values.tolist()))
        return scores

    def _follow_target(
        self,
        batch: Any,
        plan: VerifyPlan,
        output: VerifyOutput,
        cuts: Sequence[Cut],
        drafts: Sequence[RoundDraft],
        chains: Sequence[GrammarChain | None],
    ) -> tuple[list[Decision], SampledRows]:
        """Sample the target at the rows the cuts ask for, and decide."""
        rows: list[int] = []
        owner: list[int] = []
        offset: list[int] = []
        first: list[int] = []
        for i, cut in enumerate(cuts):
            first.append(len(rows))
            span = range(cut.num_kept, cut.tail_end + 1)
            rows += [plan.root_rows[i] + j for j in span]
            offset += span
            owner += [i] * len(span)
        device = batch.seq_lens.device
        positions = [plan.seq_lens[i] + j for i, j in zip(owner, offset, strict=True)]
        tokens, sampled = sample_rows(
            self.verifier.runner,
            self.verifier.logits_at(output, rows),
            sampling_info=expand_rows(batch.sampling_info, owner, device),
            positions=torch.tensor(positions, device=device),
            grammar_mask=mask_for_rows(chains, owner, offset),
            needs=logprob_needs(batch, owner),
        )
        chosen = tokens.tolist()
        ends = [*first[1:], len(rows)]
        decisions = [
            decide(cut, draft.tokens, chosen[a:b])
            for cut, draft, a, b in zip(cuts, drafts, first, ends, strict=True)
        ]
        return decisions, SampledRows(
            first, sampled, output.hidden_states, plan.root_rows
        )

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
        options = RequestOptions.of(req, self.config)
        judge = None
        if options.mode == "semantic":
            judge = self._judge(options.judge_suffix)
        known = report.report_of(req)
        state = RequestState(
            options=options,
            stop_ids=stop_token_ids(req, self.model_eos_ids),
            judge=judge,
            report=known
            or RequestReport(options.mode, options.fallback, options.report),
            window=first_window(options.mode),
        )
        report.attach(req, state.report)
        self._states[req] = state
        return state

    def _segmenter(self, name: str) -> Segmenter:
        if name not in self._segmenters:
            self._segmenters[name] = Segmenter(name, self._token_texts)
        return self._segmenters[name]

    def _judge(self, question: str) -> JudgePrompt:
        if question not in self._judges:
            self._judges[question] = build_judge_prompt(
                self.tokenizer, question, self.config.verdict_pairs
            )
        return self._judges[question]

    def _seam_text(self, req: Any) -> str:
        texts = self._token_texts
        return "".join(texts[t] for t in req.output_ids[-SEAM_TOKENS:])


def choose_cuts(
    plan: VerifyPlan,
    scores: Sequence[Sequence[float]],
    states: Sequence[RequestState],
) -> list[Cut]:
    """One cut per request, by its own mode, threshold and keep rule."""
    cuts = []
    for i, state in enumerate(states):
        options, num_draft = state.options, plan.num_draft_tokens[i]
        if options.mode != "semantic":
            cuts.append(exact_cut(num_draft))
            continue
        cuts.append(
            choose_cut(
                scores[i],
                plan.boundaries[i],
                num_draft_tokens=num_draft,
                threshold=options.threshold,
                keep_rule=options.keep_rule,
                exact_tail=options.exact_tail,
            )
        )
    return cuts


def logprob_needs(batch: Any, owner: Sequence[int]) -> LogprobNeeds:
    """The batch's logprob requests, a row per sampled row."""
    if not batch.return_logprob:
        return LogprobNeeds(False, [], [])
    return LogprobNeeds(
        return_logprob=True,
        top_logprobs_nums=[batch.top_logprobs_nums[i] for i in owner],
        token_ids_logprobs=[batch.token_ids_logprobs[i] for i in owner],
    )
