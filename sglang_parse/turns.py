"""How much each request drafts this round, and who drafts it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from sglang_parse.config import ParseConfig
from sglang_parse.decide import Cut, Decision
from sglang_parse.drafters import Turn
from sglang_parse.grammar import MAX_GRAMMAR_WINDOW, GrammarChain
from sglang_parse.memory import RoundSlots
from sglang_parse.pace import RoundController, RoundLimits, RoundTiming
from sglang_parse.ranks import Ranks
from sglang_parse.spacing import JudgeSpacing
from sglang_parse.state import RequestState, RoundDraft
from sglang_parse.telemetry import TELEMETRY
from sglang_parse.window import (
    MIN_WINDOW,
    SHORT_WINDOW,
    draft_window,
    fit_windows,
    next_window,
)

# SGLang decodes the answer anew for each token of a round and each stop expression that
# does not match (schedule_batch.py, `_locate_str_stop_finished_len`).
MAX_STOP_CHECKS = 256
# Set on the batches of a PARSE server.
NUM_WAITING = "parse_num_waiting"


def note_waiting(scheduler: Any, batch: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook on Scheduler.run_batch: how many requests wait for the round to end.

    Those that nothing but the end of others would let in are not helped by shorter
    rounds, so only as many as there are free rows. Only where PARSE serves.
    """
    if TELEMETRY.settings is None:
        return
    waiting = len(scheduler.waiting_queue)
    if waiting:
        free = scheduler.get_num_allocatable_reqs(len(batch.reqs))
        waiting = min(waiting, max(0, free))
    setattr(batch, NUM_WAITING, waiting)


def longest_draft(req: Any) -> int:
    """Draft tokens of a round that the request's grammar and stop expressions allow."""
    most = MAX_GRAMMAR_WINDOW if req.grammar else 1 << 30
    num = len(req.sampling_params.stop_regex_strs or ())
    return min(most, max(MIN_WINDOW, MAX_STOP_CHECKS // num)) if num else most


class TurnPlanner:
    """Plans the turns of the drafters from what each has been worth.

    has_model: whether there is a draft model. head_steps: tokens the EAGLE-3 head
    drafts at a time, 0 without one. context_len: the target's, in tokens.
    """

    def __init__(
        self,
        config: ParseConfig,
        ranks: Ranks,
        slots: RoundSlots,
        *,
        context_len: int,
        has_model: bool,
        head_steps: int,
    ) -> None:
        self.adaptive = config.adaptive
        self.ranks = ranks
        self.slots = slots
        self.context_len = context_len
        self.has_model = has_model
        self.head_steps = head_steps
        self.model_controller = RoundController(config.max_round_ms)
        self.head_controller = RoundController(0)
        self.spacing = JudgeSpacing()

    def plan(
        self,
        batch: Any,
        states: Sequence[RequestState],
        seq_lens: Sequence[int],
        chains: Sequence[GrammarChain | None],
    ) -> Turn:
        limits = [
            draft_window(
                state.options.window,
                num_remaining=req.sampling_params.max_new_tokens
                - len(req.output_ids)
                - len(state.ready),
                num_positions=self.context_len - seq_len - 1 - len(state.suffix),
            )
            if state.options.mode != "off" and not state.is_ending
            else 0
            for req, state, seq_len in zip(batch.reqs, states, seq_lens, strict=True)
        ]
        if self.adaptive and any(s.options.mode == "off" for s in states):
            limits = [min(w, SHORT_WINDOW) for w in limits]
        limits = [
            min(w, longest_draft(req))
            for w, req in zip(limits, batch.reqs, strict=True)
        ]
        by_model = [self._by_model(s, c) for s, c in zip(states, chains, strict=True)]
        windows = [
            w if drafted else min(w, len(s.pending))
            for w, drafted, s in zip(limits, by_model, states, strict=True)
        ]
        semantic = _is_semantic(states)
        paused, judged, judge_every = False, semantic, 1
        if self.adaptive and any(
            w and drafted for w, drafted in zip(windows, by_model, strict=True)
        ):
            limits_now, judge_every = self._agreed_limits(batch, states, judged=judged)
            judged, paused = limits_now.judged, limits_now.steps == 0
            windows = [
                min(w, limits_now.steps + len(s.pending))
                for w, s in zip(windows, states, strict=True)
            ]
        if self.adaptive:
            windows = [
                min(w, s.window(judged=judged and not s.is_exact) or w)
                for w, s in zip(windows, states, strict=True)
            ]
        if semantic and not judged:
            # Followed token by token like a request in exact mode: the head's turn.
            windows = [
                min(w, len(s.pending)) if self._head_goes(s, c) else w
                for w, s, c in zip(windows, states, chains, strict=True)
            ]
        by_head = paused or (semantic and not judged)
        heads = [
            min(w, self.head_steps) if self._by_head(s, c, always=by_head) else 0
            for w, s, c in zip(limits, states, chains, strict=True)
        ]
        if self.adaptive and any(heads) and not any(windows):
            steps = self.head_controller.limits(len(states), ways={False}).steps
            heads = heads if self.ranks.agree(steps) else [0] * len(heads)
        windows = [max(w, h) for w, h in zip(windows, heads, strict=True)]
        if any(windows):
            room = self.slots.num_free(batch.tree_cache)
            held = [r.kv.kv_allocated_len for r in batch.reqs]
            windows = fit_windows(
                windows,
                seq_lens=seq_lens,
                held=held,
                room=room,
                max_rows=self.slots.max_rows,
            )
        heads = [min(h, w) for h, w in zip(heads, windows, strict=True)]
        return Turn(
            batch, states, seq_lens, windows, heads, chains, judged, judge_every
        )

    def _agreed_limits(
        self, batch: Any, states: Sequence[RequestState], *, judged: bool
    ) -> tuple[RoundLimits, int]:
        """The first rank's limits, and at every so-manieth boundary it would judge.
        judged: whether there is anything to judge.

        Only where every semantic request may be followed token by token instead is
        that tried: not without the exact tail, nor for a client's text.
        """
        semantic = [s for s in states if s.options.mode == "semantic"]
        ways = {judged}
        if all(s.options.exact_tail and s.client is None for s in semantic):
            ways.add(False)
        limits = self.model_controller.limits(
            len(states), ways=ways, num_waiting=getattr(batch, NUM_WAITING, 0)
        )
        every = self.spacing.every(
            len(states),
            suffix_len=max((len(s.suffix) for s in semantic), default=0),
            segment_len=self.model_controller.segment_len,
        )
        measured = [limits.steps, int(limits.judged), every]
        steps, is_judged, every = self.ranks.agree_all([measured])[0]
        return RoundLimits(steps, bool(is_judged)), every

    def _by_model(self, state: RequestState, chain: GrammarChain | None) -> bool:
        """Whether the draft model writes for this request: unless the head does."""
        return self.has_model and not (state.is_exact and self._head_goes(state, chain))

    def _head_goes(self, state: RequestState, chain: GrammarChain | None) -> bool:
        """Whether the head can write for this request."""
        return state.hint is not None and chain is None

    def _by_head(
        self, state: RequestState, chain: GrammarChain | None, *, always: bool
    ) -> bool:
        """Whether the head writes: wherever the target is followed token by token.

        always: in the whole round, whatever the request's own state.
        """
        followed = state.is_exact or state.recovering or always
        return (
            self._head_goes(state, chain)
            and not state.pending
            and bool(followed or not self.has_model)
        )

    def adapt(
        self,
        turn: Turn,
        drafts: Sequence[RoundDraft],
        cuts: Sequence[Cut],
        decisions: Sequence[Decision],
    ) -> None:
        """Each request's next window, from what became of this one."""
        num_tokens = num_failures = 0
        for i, state in enumerate(turn.states):
            failed = cuts[i].failed_at_verdict(decisions[i])
            rejected_end = cuts[i].rejected_end if failed else 0
            # Of a segment that failed with others already, one failure is enough.
            num_failures += failed and rejected_end > state.num_suspect
            state.follow_verdict(len(decisions[i].accept_tokens), rejected_end)
            end = max(rejected_end, decisions[i].num_judged)
            num_tokens += max(0, end - cuts[i].head_end)
            if drafts[i].num_head and not drafts[i].num_new:
                continue  # the head's agreement says nothing of the draft model's
            rejected_len = max(0, rejected_end - cuts[i].num_kept)
            judged = turn.judged and not state.is_exact
            window = next_window(
                state.window(judged=judged),
                num_draft=len(drafts[i].tokens) - len(decisions[i].pending),
                num_correct=decisions[i].num_correct_drafts,
                rejected_len=rejected_len,
                least=self.model_controller.least_window(judged=judged),
            )
            if judged:
                state.judged_window = window
            else:
                state.followed_window = window
        if turn.judged:
            self.spacing.observe_verdicts(num_tokens, num_failures)

    def observe(
        self, turn: Turn, drafts: Sequence[RoundDraft], timing: RoundTiming
    ) -> None:
        """Learn from a round with drafts; timing.num_steps: of the draft model."""
        if timing.num_rows:
            self.spacing.observe_pass(timing.bs, timing.num_rows, timing.pass_ms)
        if timing.num_steps:
            num_new = sum(d.num_new for d in drafts)
            self.spacing.observe_draft(num_new, timing.draft_ms)
        if timing.num_steps:
            self.model_controller.observe(timing)
            return
        num_head = max(d.num_head for d in drafts)
        if not num_head:
            return  # a client's text costs nothing to draft
        by_head = replace(timing, num_steps=num_head, judged=False)
        self.head_controller.observe(by_head)
        if _is_semantic(turn.states) and not turn.judged:
            # What verdicts would have to beat.
            self.model_controller.observe(by_head)
            return
        # A pass over a few rows costs what a plain round does. The draft model pauses
        # where it loses against that one, not against the head.
        plain = replace(timing, num_emitted=timing.bs, draft_ms=0.0, judged=True)
        self.model_controller.observe(plain)

    def observe_plain(self, bs: int, round_ms: float) -> None:
        """Learn from a round in which nobody drafted."""
        timing = RoundTiming(bs, 0, bs, 0.0, round_ms)
        self.model_controller.observe(timing)
        self.head_controller.observe(timing)


def _is_semantic(states: Sequence[RequestState]) -> bool:
    """Whether there is anybody whose drafts may be judged."""
    return any(s.options.mode == "semantic" for s in states)
