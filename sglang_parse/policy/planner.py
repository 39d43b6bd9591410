"""What each request drafts this round, who drafts it, and whether it is judged."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from sglang_parse.drafting.drafter import Drafter
from sglang_parse.options.server import ParseConfig
from sglang_parse.policy.copying import Copier, CopyPlanner
from sglang_parse.policy.gate import Gate, Situation
from sglang_parse.policy.window import Choice, next_window
from sglang_parse.policy.windows import fit_windows, longest_window, plain_steps
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.sgl.ranks import Ranks

if TYPE_CHECKING:
    from sglang_parse.sgl.slots import RoundSlots

logger = logging.getLogger(__name__)

# Output tokens of the request that SGLang sends a server first (http_server.py,
# `_execute_server_warmup`). So short an answer says nothing of drafts.
WARM_UP_TOKENS = 8
# New draft tokens of a recovering request up to which a head writes alone.
SHORT_RECOVERY = 32
# Draft steps after which a pass begins where a request waits for one without a draft:
# so long it gets no token.
WAITING_STEPS = 16
# Share of its window from which on a draft joins a pass, and segments at least.
JOINING, ENOUGH_SEGMENTS = 0.5, 1.5
# Milliseconds of a draft phase in which draft models read texts, such as prompts of new
# requests: so long the others wait.
READ_MS = 50.0
# Tokens that they read at least.
LEAST_READ = 256


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
        self.adaptive = config.adaptive
        self.max_round_ms = config.max_round_ms
        self.ranks = ranks
        self.slots = slots
        self.context_len = context_len
        self.gate = Gate()
        self.head = self.gate.head
        copier = next((d for d in drafters if isinstance(d, Copier)), None)
        self.copying = CopyPlanner(copier, self.gate, ranks) if copier else None
        self.segment_level = [d for d in drafters if not d.token_level]
        self.heads = [d for d in drafters if d.token_level and d is not copier]

    def plan(self, round: Round) -> None:
        """Fill `limit`, `window` and `budgets` of requests; of the round `judged`,
        `judge_every`, `reason`, `num_steps` and when its draft phase ends."""
        round.num_running = len(round)
        for r in round:
            r.limit = longest_window(r, self.context_len)
        round.judged, round.judge_every = round.has_semantic, 1
        for r in round:
            num_pending = len(r.state.pending)
            r.window = r.limit if self._drafts(r) else min(r.limit, num_pending)
        paused = self.adaptive and self._choose(round)
        self._set_budgets(round, paused=paused)
        if self.head.rests:
            self._look_at_head(round)
        round.head_rests = self.head.rests
        if self.copying is not None:
            self.copying.plan(round, adaptive=self.adaptive)
        self._fit(round)
        if self.adaptive:
            self._bound_phase(round)
        if steps := self._plain_steps(round, paused=paused):
            ((round.num_steps,),) = self.ranks.agree_all([[steps]])

    # -- How much --------------------------------------------------------------

    def _choose(self, round: Round) -> bool:
        """Windows by the choice of the gate; whether drafters of segments pause.

        Ranks learn from their own times, and so differently: all take what the first
        rank has chosen, its windows too.
        """
        writing = [r for r in round if r.window and self._drafts(r)]
        if not writing:
            return False
        choice = self._choice(round, writing)
        ours = [int(choice.steps == 0), int(choice.judged), choice.every]
        drafts = [self._num_new(r, choice) for r in writing]
        if choice.writers:
            # The shortest texts are the soonest read.
            order = sorted(range(len(writing)), key=lambda i: writing[i].seq_len)
            for i in order[choice.writers :]:
                drafts[i] = 0
        # A draft without a boundary would be followed token by token.
        least = ENOUGH_SEGMENTS * self.gate.accept.segment_len if choice.judged else 0.0
        (paused, judged, every), agreed = self.ranks.agree_all([ours, drafts])
        round.judged, round.judge_every = bool(judged), every
        for r, num_new in zip(writing, agreed, strict=True):
            held = r.state.draft
            num = max(len(held.tokens), held.num_left_over + num_new)
            r.window = min(r.window, num)
            r.num_enough = max(JOINING * num_new, least)
        return bool(paused)

    def _num_new(self, r: RequestRound, choice: Choice) -> int:
        """New draft tokens of a request."""
        if not choice.judged or not choice.steps:
            return choice.steps
        if r.state.recovering or r.state.is_exact:
            return choice.recovery
        return self.gate.accept.own_window(r.state, choice.steps)

    def _choice(self, round: Round, writing: Sequence[RequestRound]) -> Choice:
        """This rank's choice.

        Only where every semantic request may be followed token by token instead is
        that tried: not without the exact tail, nor for a client's text.
        """
        semantic = [r for r in round if r.state.options.mode == "semantic"]
        most = max(r.window - r.state.draft.num_left_over for r in writing)
        # Near their ends answers leave less room each round, and the choice stays.
        longest = max(r.state.options.window for r in writing) or next_window(most)
        spacings = {r.state.options.judge_every for r in semantic}
        choice, round.reason = self.gate.choose(
            Situation(
                bs=len(round),
                most=max(most, min(next_window(most), longest)),
                suffix_len=max((r.suffix_rows for r in semantic), default=0),
                can_judge=bool(semantic),
                can_follow=all(
                    r.state.options.exact_tail and r.state.client is None
                    for r in semantic
                ),
                every=spacings.pop() if len(spacings) == 1 else 0,
                has_head=any(self._head_of(r) for r in round),
            )
        )
        return choice

    def _drafts(self, r: RequestRound) -> bool:
        """Whether a drafter of whole segments writes for this request.

        A request in exact mode is left to a drafter that works token by token.
        """
        if not any(d.can_draft(r) for d in self.segment_level):
            return False
        return not (r.state.is_exact and self._head_of(r))

    # -- Who -------------------------------------------------------------------

    def _head_of(self, r: RequestRound) -> Drafter | None:
        """Who drafts token by token for this request."""
        if self.head.rests:
            return None
        return next((d for d in self.heads if d.can_draft(r)), None)

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
            others = any(d.can_draft(r) for d in self.segment_level)
            is_single = r.state.is_exact or r.state.recovering
            if is_single or paused or followed or not others:
                num = min(r.limit, head.max_tokens)
                r.budgets = {head.name: num} if num else {}
            if self.adaptive and r.budgets and 0 < r.window <= SHORT_RECOVERY:
                # The draft model does not write on after what may not stand.
                r.window, r.by_segments = num, False
        others = any(r.window > len(r.state.pending) for r in round)
        if self.adaptive and not others and not self.head.rests:
            self._ask_head(round)
        for r in round:
            r.window = max(r.window, *r.budgets.values(), 0)

    def _ask_head(self, round: Round) -> None:
        """Nobody else drafts: do drafts that are followed token by token pay?"""
        num_able = sum(bool(r.budgets) for r in round)
        if not (num_able or self.head.is_woken):
            return  # A head that cannot draft, as under a grammar, does not rest.
        bs = len(round)
        answer = bool(self.ranks.agree(int(self.gate.asks_head(bs, num_able))))
        plain_ms = self.gate.costs.plain_ms(bs)
        self.head.follow(bs, answer, plain_ms=plain_ms, now_ms=self.gate.ms)
        if answer:
            round.chains = self.gate.chain_rule(bs)
            return
        for r in round:
            r.budgets = {}
        if self.head.rests:
            logger.info("PARSE: the head does not pay at %d requests and rests", bs)

    def _look_at_head(self, round: Round) -> None:
        """Wake the head where it paid at this number of requests, or to try it."""
        if self.head.is_time_to_look():
            bs = len(round)
            rate = bs / self.gate.costs.plain_ms(bs)
            wakes = self.head.may_ask(bs, rate, self.gate.ms)
            if self.ranks.agree(int(wakes)):
                logger.info("PARSE: the head reads again, for new requests")
                self.head.wake()

    def _fit(self, round: Round) -> None:
        """Shrink windows to the free slots and the rows of a pass."""
        if any(r.window for r in round):
            windows = fit_windows(
                [r.window for r in round],
                seq_lens=[r.seq_len for r in round],
                held=[r.req.kv.kv_allocated_len for r in round],
                room=self.slots.num_free(round.batch.tree_cache, len(round)),
                max_rows=self.slots.max_rows,
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

    # -- How long --------------------------------------------------------------

    def _bound_phase(self, round: Round) -> None:
        """When the draft phase ends before all drafts are complete, and how much draft
        models read in it.

        At once where nobody else is given tokens but drafts go on. Where somebody waits
        for the scheduler, after a bounded time.
        """
        costs = self.gate.costs.nearest(len(round))
        steps = idle = read = 1 << 30
        names = {d.name for d in self.segment_level}
        if not all(names & r.budgets.keys() for r in round):
            steps = WAITING_STEPS
        if not self.gate.is_trial:
            idle = math.ceil(len(round) / costs.bs * costs.most_idle_steps)
        if costs.draft.token_ms:
            read = int(READ_MS / costs.draft.token_ms)
        if round.num_waiting and self.max_round_ms and costs.draft.slope_ms:
            steps = min(steps, int(self.max_round_ms / costs.draft.slope_ms))
        ours = [max(1, steps), idle, max(LEAST_READ, read)]
        (agreed,) = self.ranks.agree_all([ours])
        round.most_draft_steps, round.most_idle_steps, round.most_read = agreed

    # -- Rounds without drafts -------------------------------------------------

    def _plain_steps(self, round: Round, *, paused: bool) -> int:
        """Decode steps if nobody drafts, on this rank. 0, for one and no more, where
        somebody drafts, may copy what comes next, or reads each step's hidden states;
        or where drafts go on after a segment that failed, as they do unless they are
        paused."""
        if not self.adaptive or self.copying is not None:
            return 0
        if any(r.window or self._head_of(r) for r in round):
            return 0
        recovering = any(r.state.recovering and not r.state.is_exact for r in round)
        if recovering and not paused:
            return 0
        bs, costs = len(round), self.gate.costs
        steps = plain_steps(
            round, step_ms=costs.step_ms(bs), context_len=self.context_len
        )
        if round.num_waiting:
            return 1
        room = self.slots.num_free(round.batch.tree_cache, bs)
        return steps if room >= bs * steps else 1

    # -- What follows ----------------------------------------------------------

    def adapt(self, round: Round) -> None:
        """Learn from what became of the drafts."""
        for r in round:
            if r.req.sampling_params.max_new_tokens > WARM_UP_TOKENS:
                self.gate.learn(r, judged=round.judged)
            r.state.follow_verdict(len(r.decision.accept_tokens), r.rejected_end)

    def observe(self, round: Round) -> None:
        """Learn from what a round cost. round: of the requests whose drafts were
        complete."""
        bs, is_plain = len(round), "plain" in round.seconds
        ms = self.gate.costs.learn(round)
        tokens = sum(len(r.decision.accept_tokens) for r in round)
        names = {d.name for d in self.heads}
        others = any(r.draft.num_segment_level or r.draft.num_copied for r in round)
        if not others and any(r.budgets.keys() & names for r in round):
            plain_ms = self.gate.costs.plain_ms(bs)
            self.head.learn(bs, tokens, ms, plain_ms=plain_ms, now_ms=self.gate.ms)
        self.gate.spend(ms, tokens, is_plain=is_plain)
