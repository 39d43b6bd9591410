"""PARSE (arXiv:2605.04263) as a batch loop: the file to read.

Drafters write ahead for all running requests, a step at a time. As soon as enough
drafts are complete to be worth a pass of the target, these are cut at the ends of their
segments, and one pass judges every prefix that ends there. The longest prefix that is
valid is kept; from there the target is followed token by token while it agrees with the
draft. The other requests take no part in that pass and keep on drafting after it.

SGLang's scheduler is asked again after a quantum: a bounded time in which there may be
several passes. The engine works on one record per request
(`requests/round_records.py`) and imports no SGLang.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from sglang_parse.engine.failures import GuardedDrafters, guard
from sglang_parse.engine.outcome import decode, follow_target, record
from sglang_parse.engine.ports import Target
from sglang_parse.engine.segmenting import Segmenting
from sglang_parse.engine.shown import lay_out, resume_draft
from sglang_parse.engine.verdict_source import SuffixVerdicts, VerdictSource
from sglang_parse.policy.planner import RoundPlanner
from sglang_parse.reporting.drafters import tokens_behind
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.round_records import RequestRound, Round, Segments
from sglang_parse.sgl.fast_paths import PassFailed, PassLacksMemory
from sglang_parse.sgl.ranks import Ranks
from sglang_parse.verify.layout import VerifyPlan

if TYPE_CHECKING:
    from sglang_parse.sgl.slots import RoundSlots

# Seconds after which a quantum ends once a request was given a token in it.
QUANTUM_S = 0.1
# A quantum also ends where the next round might be short of slots: so many rounds like
# the last one have to fit into those that are free.
ROOM_ROUNDS = 2


class RoundEngine:
    """Runs rounds. What it knows of a request is in the request's state."""

    def __init__(
        self,
        *,
        target: Target,
        slots: RoundSlots,
        drafters: GuardedDrafters,
        planner: RoundPlanner,
        segmenting: Segmenting,
        ranks: Ranks,
        verdicts: VerdictSource | None = None,
        view: Callable[[Any, Sequence[int]], Any] = lambda batch, index: batch,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """verdicts: by default each has a judge suffix. view: the batch of the requests
        at these indices of a batch. clock: seconds."""
        self.target = target
        self.slots = slots
        self.drafters = drafters
        self.planner = planner
        self.segmenting = segmenting
        self.ranks = ranks
        self.verdicts = verdicts or SuffixVerdicts()
        self.view = view
        self.clock = clock

    # -- A quantum -------------------------------------------------------------

    def run_quantum(self, open_round: Callable[[], Round]) -> list[Round]:
        """Rounds of the same requests until the scheduler has to be asked.

        Returns the rounds of the passes. What they decide is `ready` in the states of
        their requests; a request whose draft is not complete has nothing there.

        open_round: these requests as they stand.
        """
        started, passes = self.clock(), list[Round]()
        while True:
            round = open_round()
            done = self.run(round)
            if done.requests:
                passes.append(done)
            if not self._goes_on(round, done):
                return passes
            is_over = bool(passes) and self.clock() - started >= QUANTUM_S
            if self._is_due(round, is_over=is_over):
                return passes

    def _goes_on(self, round: Round, done: Round) -> bool:
        """Whether the next round needs nothing that the scheduler does after this one.

        It ends answers, finds stop strings, lets requests in that wait, and moves
        grammars on.
        """
        if not self.planner.adaptive or not round.may_repeat:
            return False
        if round.num_waiting or any(
            r.error or r.is_at_its_end or (r.has_stop_text and r.decision.accept_tokens)
            for r in done
        ):
            return False
        free = self.slots.num_free(round.batch.tree_cache, len(round))
        return free >= ROOM_ROUNDS * sum(r.num_columns for r in round)

    def _is_due(self, round: Round, *, is_over: bool = False) -> bool:
        """Whether the scheduler has to be asked now. The first rank knows."""
        return bool(self.ranks.agree(int(is_over or round.has_mail())))

    # -- A round ---------------------------------------------------------------

    def run(self, round: Round) -> Round:
        """Plan and draft; then lay out, one pass, score, cut, follow and commit for the
        requests whose drafts are complete.

        Returns the round of these, in which each record is filled; it may be empty.
        What is decided is `ready` in their states. A request whose `error` is set is
        given nothing.
        """
        started = self.clock()
        round.is_due = partial(self._is_due, round)
        self.verdicts.open(round)
        self.planner.plan(round)
        self.draft(round)
        done = self._complete(round)
        drafted = self.clock()
        done.seconds["draft"] = drafted - started
        if done.is_drafted:
            self._pass(done, drafted)
        elif done.requests:
            self._decode(done, drafted)
        self.planner.observe(done)
        for r in done:
            if r.error is None:
                r.state.ready = (*r.state.ready, *r.decision.accept_tokens)
        return done

    def _pass(self, round: Round, drafted: float) -> None:
        """A verify pass of the target."""
        round.num_steps = 1
        self.segment(round)
        plan = lay_out(round)
        planned = self.clock()
        try:
            self.verify(round, plan)
        except PassFailed as error:
            if not isinstance(error, PassLacksMemory):
                self.stop_drafting()
            for r in round:
                r.draft, r.segments = Draft(), Segments()
            self._decode(round, planned)
            return
        scored = self.clock()
        follow_target(round, self.target)
        self.commit(round)
        self.planner.adapt(round)
        self.drafters.after_pass(round)
        round.seconds |= {
            "layout": planned - drafted,
            "verify": scored - planned,
            "decide": self.clock() - scored,
        }

    def _decode(self, round: Round, drafted: float) -> None:
        """No draft has a token: the target's ordinary decode steps."""
        decode(round, self.target, round.is_due)
        self.commit(round)
        for r in round:
            r.state.follow_verdict(len(r.decision.accept_tokens), 0)
        decided = self.clock()
        self.drafters.after_pass(round)
        round.seconds |= {"plain": decided - drafted, "follow": self.clock() - decided}

    def stop_drafting(self) -> None:
        """No pass can run: from now on the target answers alone."""
        self.drafters.drafters = ()
        self.planner.segment_level, self.planner.heads = [], []
        self.planner.copying = None

    # -- Stages ----------------------------------------------------------------

    def draft(self, round: Round) -> None:
        """A draft phase: every drafter in its turn goes on with the drafts."""
        wanted = [r.seq_len + max(r.num_columns, round.num_steps) for r in round]
        self.slots.extend_rows(round.batch, wanted)
        try:
            for r in round:
                guard(r, resume_draft)
            self.drafters.draft(round)
        finally:
            for r in round:
                if r.grammar is not None:
                    r.grammar.rewind()

    def _complete(self, round: Round) -> Round:
        """The requests whose drafts are complete; the drafts of the others are kept.

        A request with enough drafted tokens joins the pass of others: the fixed time
        is paid, and what is wrong in its draft is found early.
        """
        if not all(r.is_drafting for r in round):
            for r in round:
                r.is_drafting &= r.draft.num_new < r.num_enough
        index = [i for i, r in enumerate(round) if not r.is_drafting or r.error]
        for r in round:
            if r.is_drafting:
                r.state.draft = r.draft
        if len(index) == len(round):
            return round
        batch = self.view(round.batch, index) if index else round.batch
        return round.of([round.requests[i] for i in index], batch)

    def segment(self, round: Round) -> None:
        """Choose the boundaries to judge: as many as there is room for."""
        num_rows = sum(1 + len(r.draft.tokens) for r in round)
        rows_left = max(0, self.slots.max_rows - num_rows)
        room = min(self.slots.num_free(round.batch.tree_cache), rows_left)
        self.segmenting.segment(round, room=room)
        self.verdicts.choose(round, room=room)

    def verify(self, round: Round, plan: VerifyPlan) -> None:
        """One pass of the target, and the scores of its verdicts."""
        round.output = self.target.verify(round, plan)
        round.num_rows = plan.num_verify_tokens
        self.verdicts.settle(round, self.ranks.agree_all(self.verdicts.read(round)))

    def commit(self, round: Round) -> None:
        """Keep what the draft holds after the cut and what the target has to rewrite,
        and tell the reports; free slots.
        """
        keep = []
        for r in round:
            guard(r, self.segmenting.recover)
            guard(r, partial(record, reason=round.reason))
            r.state.draft = left_over(r)
            pending = r.state.pending
            keep.append(r.new_len + len(pending) + bool(pending))
        self.slots.trim_rows(round.batch, keep)


def left_over(r: RequestRound) -> Draft:
    """What of a draft the pass neither kept nor dropped."""
    pending = r.decision.pending
    if not pending:
        return Draft()
    num_client = r.draft.num_client - len(r.decision.accept_tokens)
    return Draft(
        pending,
        r.draft.ended,
        num_client=max(0, num_client),
        held=tuple(tokens_behind(r.draft.written_by, max(0, -num_client))),
    )
