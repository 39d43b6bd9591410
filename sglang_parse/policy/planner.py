"""What each request drafts this round, who drafts it, and whether it is judged."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from weakref import ref

from sglang_parse.options.server import ParseConfig
from sglang_parse.policy.controller import Asked, Controller
from sglang_parse.policy.copying import Copier, CopyPlanner
from sglang_parse.policy.goodput import Choice, next_window
from sglang_parse.policy.head import HeadPlanner
from sglang_parse.policy.in_a_row import has_room, may_go_on
from sglang_parse.policy.learn import learn_confidence, learn_costs, learn_drafts
from sglang_parse.policy.own_windows import OwnWindows
from sglang_parse.policy.plain_steps import (
    FIRST_STEPS,
    LOOK_UP_MS,
    AheadPace,
    plain_steps,
)
from sglang_parse.policy.protocols import Agreement, SlotCounts, Writer
from sglang_parse.policy.windows import SHORT_WINDOW, fit_windows, longest_window
from sglang_parse.requests.round import RequestRound, Round
from sglang_parse.requests.state import RequestState

logger = logging.getLogger(__name__)

# Output tokens of the request that SGLang sends a server first (http_server.py,
# `_execute_server_warmup`). Its prompt says nothing of what users ask.
WARM_UP_TOKENS = 8
# New draft tokens of a request in recovery up to which a drafter of single tokens that
# there is writes alone.
SHORT_RECOVERY = 32


class RoundPlanner:
    """Plans a round from what earlier ones cost and gave.

    Drafters of two kinds take part. Those that write whole segments are judged; those
    that work token by token write where the target is followed token by token.

    context_len: of the target, in tokens. runs_ahead: whether one of its decode steps
    may run while the scheduler works.
    """

    def __init__(
        self,
        config: ParseConfig,
        ranks: Agreement,
        slots: SlotCounts,
        drafters: Sequence[Writer],
        *,
        context_len: int,
        runs_ahead: bool = False,
    ) -> None:
        self.adaptive = config.adaptive
        self.max_round_ms = config.max_round_ms
        self.ranks = ranks
        self.slots = slots
        self.context_len = context_len
        self.controller = Controller(runs_ahead=runs_ahead)
        copier = next((d for d in drafters if isinstance(d, Copier)), None)
        self.copying = CopyPlanner(copier, self.controller, ranks) if copier else None
        self.segment_level = [d for d in drafters if not d.token_level]
        self.head = HeadPlanner(
            [d for d in drafters if d.token_level and d is not copier],
            self.controller,
            ranks,
        )
        self.elsewhere = tuple(d.name for d in self.segment_level if d.elsewhere)
        self.ahead_pace = AheadPace()
        self.own_windows = OwnWindows(self.controller.drafts)
        #: Whether the last round was plain, and the next one was to be.
        self._went_on = False
        self._is_told = False
        self._first: ref[RequestState] | None = None

    def plan(self, round: Round) -> None:
        """Fill `limit`, `window` and `budgets` of requests; of the round `judged`,
        `judge_every`, `reason`, `num_steps` and `goes_on`."""
        for r in round:
            r.limit = longest_window(r, self.context_len)
        if self.adaptive and any(r.state.options.mode == "off" for r in round):
            for r in round:
                r.limit = min(r.limit, SHORT_WINDOW)
        round.judged, round.judge_every = round.has_semantic, 1
        for r in round:
            num_pending = len(r.state.pending)
            r.window = r.limit if self._drafts(r) else min(r.limit, num_pending)
        paused = self.adaptive and self._choose(round)
        self._set_budgets(round, paused=paused)
        if self.head.rest.resting:
            self.head.look(round)
        round.head_rests = self.head.rest.resting
        if self.copying is not None:
            self.copying.plan(round, adaptive=self.adaptive)
        self._fit(round)
        if steps := self._plain_steps(round, paused=paused):
            self._plan_plain(round, steps)

    # -- How much --------------------------------------------------------------

    def _choose(self, round: Round) -> bool:
        """Windows by the controller's choice; whether drafters of segments pause.

        Ranks learn from their own times, and so differently: all take what the first
        rank has chosen, its windows too.
        """
        writing = [r for r in round if r.window and self._drafts(r)]
        if not writing:
            return False
        choice = self._choice(round, writing)
        slow = sum(bool(r.state.recovering or r.state.is_exact) for r in writing)
        short = slow >= min(choice.patience, len(writing))
        ours = [int(choice.steps == 0), int(choice.judged), choice.every]
        drafts = [self._num_new(r, choice, short=short) for r in writing]
        if choice.writers:
            # The shortest texts are the soonest read.
            order = sorted(range(len(writing)), key=lambda i: writing[i].seq_len)
            for i in order[choice.writers :]:
                drafts[i] = 0
        (paused, judged, every), agreed = self.ranks.agree_all([ours, drafts])
        round.judged, round.judge_every = bool(judged), every
        for r, num_new in zip(writing, agreed, strict=True):
            r.window = min(r.window, num_new + len(r.state.pending))
        return bool(paused)

    def _num_new(self, r: RequestRound, choice: Choice, *, short: bool) -> int:
        """New draft tokens of a request."""
        if not choice.judged or not choice.steps:
            return choice.steps
        if short:
            return choice.recovery
        if r.state.recovering or r.state.is_exact:
            return choice.recovery_beside
        return self.own_windows.fit(r.state, choice.steps)

    def _choice(self, round: Round, writing: Sequence[RequestRound]) -> Choice:
        """This rank's choice.

        Only where every semantic request may be followed token by token instead is
        that tried: not without the exact tail, nor for a client's text.
        """
        semantic = [r for r in round if r.state.options.mode == "semantic"]
        can_follow = all(
            r.state.options.exact_tail and r.state.client is None for r in semantic
        )
        most = max(r.window - len(r.state.pending) for r in writing)
        # Near their ends answers leave less room each round, and the choice stays.
        longest = max(r.state.options.window for r in writing) or next_window(most)
        asked = Asked(
            bs=len(round),
            most=max(most, min(next_window(most), longest)),
            suffix_len=max((r.suffix_rows for r in semantic), default=0),
            can_judge=bool(semantic),
            can_follow=can_follow,
            most_ms=self.max_round_ms if round.num_waiting else 0.0,
            head=max(
                (d.max_tokens for r in round if (d := self.head.writer(r))), default=0
            ),
        )
        choice, round.reason = self.controller.choose(asked)
        self._tell(round.reason)
        return choice

    def _tell(self, reason: str) -> None:
        """Log when verdicts stop to pay, and when they pay again."""
        if bool(reason) != self._is_told:
            self._is_told = bool(reason)
            logger.info("PARSE: %s", reason or "drafts are judged again")

    # -- Who -------------------------------------------------------------------

    def _set_budgets(self, round: Round, *, paused: bool) -> None:
        """Who writes for whom."""
        followed = round.has_semantic and not round.judged
        for r in round:
            writer = self.head.writer(r)
            if followed and writer is not None:
                # Followed token by token like a request in exact mode.
                r.window = min(r.window, len(r.state.pending))
            r.by_segments = r.window > len(r.state.pending)
            r.budgets = {}
            if writer is None or r.state.pending:
                continue
            state = r.state
            others = any(d.can_draft(r) for d in self.segment_level)
            always = paused or followed or not others
            if state.is_exact or state.recovering or always:
                num = min(r.limit, writer.max_tokens)
                r.budgets = {writer.name: num} if num else {}
            if self.adaptive and r.budgets and 0 < r.window <= SHORT_RECOVERY:
                # The draft model does not write on behind what may not stand.
                r.window, r.by_segments = num, False
        others = any(r.window - len(r.state.pending) > 0 for r in round)
        if self.adaptive and not (others or self.head.rest.resting):
            self.head.ask(round)
        for r in round:
            r.window = max(r.window, *r.budgets.values(), 0)

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
                # Nobody writes behind a copy.
                if r.by_segments and not copies and drafter.can_draft(r):
                    budgets[drafter.name] = r.window
            r.budgets = {name: num for name, num in budgets.items() if num}

    def _plain_steps(self, round: Round, *, paused: bool) -> int:
        """Decode steps if nobody drafts, on this rank. 0, for one and no more, where
        somebody is asked to, may copy what comes next, or reads each step's hidden
        states; or where drafts go on behind a segment that failed, as they do unless
        they are paused."""
        if not self.adaptive or self.copying is not None:
            return 0
        if any(r.window or self.head.writer(r) for r in round):
            return 0
        recovering = any(r.state.recovering and not r.state.is_exact for r in round)
        if recovering and not paused:
            return 0
        bs = len(round)
        costs = self.controller.costs
        steps = plain_steps(
            round, step_ms=costs.step_ms(bs), context_len=self.context_len
        )
        if not costs.knows_plain(bs):
            steps = min(steps, FIRST_STEPS)
        # One more runs ahead of the next round.
        room = self.slots.num_free(round.batch.tree_cache, bs)
        return steps if room >= bs * (steps + 1) else 1

    def _plan_plain(self, round: Round, steps: int) -> None:
        """Fewer steps than this rank would take, where the next round is plain too: a
        step that runs ahead of that hides the work between them."""
        bs = len(round)
        # A round that measures a step is followed by one with a draft.
        goes_on = steps > 1 and self.controller.costs.knows_plain(bs)
        if goes_on:
            steps = min(steps, self.ahead_pace.most(bs))
        if round.num_waiting:
            steps = 1
        looks_up = steps > 1 and self.controller.costs.step_ms(bs) >= LOOK_UP_MS
        ours = [steps, int(goes_on), int(looks_up)]
        ((steps, on, up),) = self.ranks.agree_all([ours])
        round.num_steps, round.goes_on, round.looks_up = steps, bool(on), bool(up)

    # -- What follows ----------------------------------------------------------

    def may_follow(self, round: Round) -> bool:
        """Whether another round may run right behind this one; the same on all ranks.

        Where windows are fixed each round is the scheduler's.
        """
        if not (self.adaptive and may_go_on(round)):
            return False
        return has_room(round, self.slots.num_free(round.batch.tree_cache, len(round)))

    def _drafts(self, r: RequestRound) -> bool:
        """Whether a drafter of whole segments writes for this request.

        A request in exact mode is left to a drafter that works token by token.
        """
        if not any(d.can_draft(r) for d in self.segment_level):
            return False
        return not (r.state.is_exact and self.head.writer(r))

    # -- What became of it -----------------------------------------------------

    def adapt(self, round: Round) -> None:
        """Learn from what became of the drafts."""
        for r in round:
            if self._is_warm_up(r):
                r.state.follow_verdict(len(r.decision.accept_tokens), r.rejected_end)
                continue
            if round.judged:
                self.own_windows.learn(r)
            learn_drafts(self.controller.drafts, r, judged=round.judged)
            learn_confidence(self.controller.confidence, r)
            r.state.follow_verdict(len(r.decision.accept_tokens), r.rejected_end)

    def _is_warm_up(self, r: RequestRound) -> bool:
        """Whether it is the server's first request, and as short as SGLang's own."""
        if self._first is None:
            self._first = ref(r.state)
        short = r.req.sampling_params.max_new_tokens <= WARM_UP_TOKENS
        return short and r.state is self._first()

    def observe(self, round: Round) -> None:
        """Learn from what a round cost."""
        ms = learn_costs(
            self.controller.costs,
            round,
            elsewhere=self.elsewhere,
            token_level=[d.name for d in self.head.drafters],
            follows=self._went_on,
        )
        self._went_on = round.goes_on
        self.controller.spend(ms)
        if round.took_ahead and round.between:  # no prefill kept the device busy
            self.ahead_pace.learn(len(round), is_late=round.is_late)
        tokens = sum(len(r.decision.accept_tokens) for r in round)
        self.head.learn(round, tokens, ms)
        if "plain" not in round.seconds:
            reading_ms = self.controller.costs.at(len(round)).reading_ms(round.num_read)
            self.controller.conclude_trial(tokens, ms, reading_ms)
