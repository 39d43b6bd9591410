"""What each request drafts this round, who drafts it, and whether it is judged."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_parse.drafting.drafter import Drafter
from sglang_parse.drafting.ngram import NgramDrafter
from sglang_parse.options.server import ParseConfig
from sglang_parse.policy.acceptance import ENOUGH_SEGMENTS
from sglang_parse.policy.copying import CopyPlanner
from sglang_parse.policy.gate import Gate, Situation
from sglang_parse.policy.window import next_window
from sglang_parse.requests.limits import fit_windows, longest_window
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.sgl.ranks import Ranks

if TYPE_CHECKING:
    from sglang_parse.sgl.slots import RoundSlots

logger = logging.getLogger(__name__)

# Output tokens of the request that SGLang sends a server first (http_server.py,
# `_execute_server_warmup`). So short an answer says nothing of drafts.
WARM_UP_TOKENS = 8
# Share of its window from which on a draft joins a pass.
JOINING = 0.5
# Milliseconds of a draft phase in which draft models read texts, such as prompts of new
# requests: so long the others wait. And tokens that they read at least.
READ_MS, LEAST_READ = 50.0, 256
# Rounds in which a head does not pay until it rests.
IDLE_ROUNDS = 16
# Most decode steps of a round, and their milliseconds together.
MOST_STEPS, MOST_MS = 16, 200.0
# The same of requests with stop strings, which SGLang finds after the round.
STOP_STEPS = 4
# Share of a round's rows that may lie after the ends of answers. A row among many costs
# far less than the work between two rounds.
MOST_WASTE = 1 / 8


class RoundPlanner:
    """Plans a round from what earlier ones cost and gave.

    Drafters of two kinds take part. Those that write whole segments are judged; those
    that work token by token write where the target is followed token by token.

    context_len: of the target, in tokens.
    """

    def __init__(
        self,
        config: ParseConfig,
        ranks: Ranks,
        slots: RoundSlots,
        drafters: Sequence[Drafter],
        *,
        context_len: int,
    ) -> None:
        self.adaptive, self.max_round_ms = config.adaptive, config.max_round_ms
        self.ranks, self.slots, self.context_len = ranks, slots, context_len
        self.gate = Gate()
        copier = next((d for d in drafters if isinstance(d, NgramDrafter)), None)
        self.copying = CopyPlanner(copier, self.gate, ranks) if copier else None
        self.segment_level = [d for d in drafters if not d.token_level]
        self.heads = [d for d in drafters if d.token_level and d is not copier]
        #: Whether heads read nothing; and rounds in which they were of no use.
        self.head_rests, self._num_idle = False, 0
        #: Whether they, and not the draft model, write for requests that recover.
        self.head_recovers = True

    def plan(self, round: Round) -> None:
        """Fill `limit`, `window` and `budgets` of requests; of the round `judged`,
        `judge_every`, `reason`, `num_steps` and when its draft phase ends."""
        round.num_running = len(round)
        round.judged, round.judge_every = round.has_semantic, 1
        for r in round:
            r.limit = r.window = longest_window(r, self.context_len)
            if not self._drafts(r):
                r.window = min(r.limit, len(r.state.pending))
        writing = [r for r in round if r.window and self._drafts(r)]
        paused = self.adaptive and bool(writing) and self._choose(round, writing)
        self._set_budgets(round, paused=paused)
        self._plan_head(round)
        if self.copying is not None:
            self.copying.plan(round, adaptive=self.adaptive)
        self._fit(round)
        if self.adaptive:
            self._bound_phase(round)
        if steps := self._plain_steps(round, paused=paused):
            ((round.num_steps,),) = self.ranks.agree_all([[steps]])

    def _choose(self, round: Round, writing: Sequence[RequestRound]) -> bool:
        """Windows by the choice of the gate; whether drafters of segments pause.

        Ranks learn from their own times, and so differently: all take what the first
        rank has chosen, its windows too.
        """
        one, round.reason = self.gate.choose(self._situation(round, writing))
        ours = [one.steps, int(one.judged), one.every, one.recovery, one.writers]
        (agreed,) = self.ranks.agree_all([[*ours, int(one.by_head)]])
        steps, judged, every, recovery, writers, by_head = agreed
        round.judged, round.judge_every = bool(judged), every
        self.head_recovers = bool(by_head)
        # A draft without a boundary would be followed token by token.
        least = ENOUGH_SEGMENTS * self.gate.accept.segment_len if judged else 0.0

        def is_single(r: RequestRound) -> bool:
            return bool(judged and (r.state.recovering or r.state.is_exact))

        # Where not all requests draft, those do that are judged, and of these the ones
        # with the shortest texts, which are read first.
        order = sorted(writing, key=lambda r: (is_single(r), r.seq_len))
        for i, r in enumerate(order):
            num_new = recovery if steps and is_single(r) else steps
            if 0 < writers <= i:
                num_new = 0
            held = r.state.draft
            num = max(len(held.tokens), held.num_left_over + num_new)
            r.window, r.num_enough = min(r.window, num), max(JOINING * num_new, least)
        return not steps

    def _situation(self, round: Round, writing: Sequence[RequestRound]) -> Situation:
        """Only where every semantic request may be followed token by token instead is
        that tried: not without the exact tail, nor for a client's text."""
        semantic = [r for r in round if r.state.options.mode == "semantic"]
        most = max(r.window - r.state.draft.num_left_over for r in writing)
        # Near their ends answers leave less room each round, and the choice stays.
        longest = max(r.state.options.window for r in writing) or next_window(most)
        spacings = {r.state.options.judge_every for r in semantic}
        exact = [r.state.options.exact_tail and not r.state.client for r in semantic]
        heads = [d for r in round if (d := self._head_of(r))]
        return Situation(
            bs=len(round),
            most=max(most, min(next_window(most), longest)),
            suffix_len=max((r.suffix_rows for r in semantic), default=0),
            can_judge=bool(semantic),
            can_follow=all(exact),
            every=spacings.pop() if len(spacings) == 1 else 0,
            chain=max((d.max_tokens for d in heads), default=0),
        )

    def _drafts(self, r: RequestRound) -> bool:
        """Whether a drafter of whole segments writes for this request. One in exact
        mode is left to a drafter that works token by token."""
        is_left = r.state.is_exact and self._head_of(r)
        return not is_left and any(d.can_draft(r) for d in self.segment_level)

    def _head_of(self, r: RequestRound) -> Drafter | None:
        """Who drafts token by token for this request."""
        heads = () if self.head_rests else self.heads
        return next((d for d in heads if d.can_draft(r)), None)

    def _set_budgets(self, round: Round, *, paused: bool) -> None:
        """Who writes for whom."""
        followed = round.has_semantic and not round.judged
        for r in round:
            head, num_pending = self._head_of(r), len(r.state.pending)
            if followed and head is not None:
                # Followed token by token like a request in exact mode.
                r.window = min(r.window, num_pending)
            r.by_segments = r.window > num_pending
            r.budgets = {}
            if head is None or num_pending:
                continue
            if r.by_segments and r.state.recovering and not self.head_recovers:
                continue
            others = any(d.can_draft(r) for d in self.segment_level)
            is_single = r.state.is_exact or r.state.recovering
            if is_single or paused or followed or not others:
                num = min(r.limit, head.max_tokens)
                r.budgets = {head.name: num} if num else {}
            if self.adaptive and r.budgets and r.window and is_single:
                # The draft model does not write on after what may not stand.
                r.window, r.by_segments = num, False

    def _plan_head(self, round: Round) -> None:
        """Nobody else drafts: do drafts that are followed token by token pay?

        A head reads every prompt and every token so that it can draft. Where it does
        not pay it rests, and reads nothing. Once it is woken, since it pays at this
        number of requests or is to be tried, it drafts for requests that begin later.
        """
        bs, gate = len(round), self.gate
        chain = max((d.max_tokens for d in self.heads), default=0)
        num_able = sum(bool(r.budgets) for r in round)
        others = any(r.window > len(r.state.pending) for r in round)
        if self.adaptive and (self.head_rests or (num_able and not others)):
            # A few of many requests would not decide a trial.
            asks = self.head_rests or 2 * num_able >= bs
            pays = bool(self.ranks.agree(int(asks and gate.asks_head(bs, chain))))
            round.chains = gate.chain_rule(bs, chain) if pays else None
            self._num_idle = 0 if pays else self._num_idle + 1
            self.head_rests = self._num_idle >= IDLE_ROUNDS
            if not pays:
                for r in round:
                    r.budgets = {}
            if self._num_idle == IDLE_ROUNDS:
                logger.info("PARSE: the head does not pay at %d requests and rests", bs)
        round.head_rests = self.head_rests
        for r in round:
            r.window = max(r.window, *r.budgets.values(), 0)

    def _fit(self, round: Round) -> None:
        """Shrink windows to the free slots and the rows of a pass."""
        if any(r.window for r in round):
            windows = fit_windows(
                [r.window for r in round],
                # A slot for the token behind a draft, too (`num_columns`).
                seq_lens=[r.seq_len + 1 for r in round],
                held=[r.req.kv.kv_allocated_len for r in round],
                room=self.slots.num_free(round.batch.tree_cache, len(round)),
                max_rows=self.slots.max_rows - len(round),  # a bonus token each
            )
            for r, window in zip(round, windows, strict=True):
                r.window = window
        for r in round:
            budgets = {name: min(num, r.window) for name, num in r.budgets.items()}
            copies = self.copying is not None and self.copying.name in budgets
            for drafter in self.segment_level:
                # Nobody writes after a copy.
                if r.by_segments and not copies and drafter.can_draft(r):
                    budgets[drafter.name] = r.window
            r.budgets = {name: num for name, num in budgets.items() if num}

    def _bound_phase(self, round: Round) -> None:
        """When the draft phase ends before all drafts are complete, and how much draft
        models read in it.

        Soon where nobody else is given tokens but drafts go on. Where somebody waits
        for the scheduler, after a bounded time.
        """
        costs = self.gate.costs.at(len(round))
        steps = idle = read = 1 << 30
        names = {d.name for d in self.segment_level}
        if not all(names & r.budgets.keys() for r in round):
            steps = MOST_STEPS
        if not self.gate.is_trial:
            idle = math.ceil(costs.most_idle_steps)
        if costs.read:
            read = int(READ_MS / costs.read)
        if round.num_waiting and self.max_round_ms:
            steps = min(steps, int(self.max_round_ms / costs.step))
        ours = [max(1, steps), idle, max(LEAST_READ, read)]
        (agreed,) = self.ranks.agree_all([ours])
        round.most_draft_steps, round.most_idle_steps, round.most_read = agreed

    def _plain_steps(self, round: Round, *, paused: bool) -> int:
        """Decode steps if nobody drafts, on this rank. 0, for one and no more, where
        somebody drafts, may copy what comes next, or reads each step's hidden states;
        or where drafts go on after a segment that failed, as they do unless they are
        paused."""
        if not self.adaptive or self.copying:
            return 0
        if any(r.window or self._head_of(r) for r in round):
            return 0
        recovering = any(r.state.recovering and not r.state.is_exact for r in round)
        if recovering and not paused:
            return 0
        bs, costs = len(round), self.gate.costs
        if round.num_waiting or not costs.plain.is_known:
            return 1
        step_ms, most = costs.at(bs).plain, self.context_len
        steps = plain_steps(round, step_ms=step_ms, context_len=most)
        room = self.slots.num_free(round.batch.tree_cache, bs)
        return steps if room >= bs * steps else 1

    def adapt(self, round: Round) -> None:
        """Learn from what became of the drafts."""
        for r in round:
            if r.req.sampling_params.max_new_tokens > WARM_UP_TOKENS:
                self.gate.learn(r, judged=round.judged)
            r.state.follow_verdict(len(r.decision.accept_tokens), r.rejected_end)

    def observe(self, round: Round) -> None:
        """Learn from what a round cost. round: of the requests whose drafts were
        complete."""
        tokens = sum(len(r.decision.accept_tokens) for r in round)
        names = {d.name for d in self.heads}
        others = any(r.draft.num_segment_level or r.draft.num_copied for r in round)
        by_head = not others and any(r.budgets.keys() & names for r in round)
        ms = self.gate.costs.learn(round, by_head=by_head)
        self.gate.spend(ms, tokens, is_plain="plain" in round.seconds)


def plain_steps(round: Round, *, step_ms: float, context_len: int) -> int:
    """Decode steps of a round without drafts, if no answer ends before its longest
    length and nobody waits. step_ms: of one."""
    if not round.may_repeat:
        return 1
    room = min(context_len - r.seq_len - 1 for r in round)
    most = max(1, min(MOST_STEPS, int(MOST_MS / step_ms), room))
    num_stops = sum(r.has_stop_text for r in round)
    if num_stops > MOST_WASTE * len(round):
        most = min(most, STOP_STEPS)
    left = [r.tokens_left for r in round]
    return next((num for num in range(most, 1, -1) if pays(left, num)), 1)


def pays(lens: Sequence[int], num: int) -> bool:
    """Whether few enough rows of so many steps lie after the ends of answers. lens:
    tokens of each answer up to its end, as far as is known."""
    wasted = sum(max(0, num - own) for own in lens)
    return wasted <= MOST_WASTE * num * len(lens)
