"""One round of PARSE (arXiv:2605.04263): the file to read.

Drafters write ahead. The draft is cut at the ends of its segments, and one pass of the
target judges every prefix that ends there. The longest prefix that is valid is kept;
from there the target is followed token by token while it agrees with the draft.

It works on one record per request (`requests/round_records.py`) and imports no SGLang.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial

from sglang_parse.engine.failures import GuardedDrafters, guard
from sglang_parse.engine.outcome import (
    decode,
    follow_target,
    record,
)
from sglang_parse.engine.ports import RankAgreement, Slots, Target
from sglang_parse.engine.segmenting import Segmenting
from sglang_parse.engine.shown import lay_out, pending_draft
from sglang_parse.engine.verdict_source import SuffixVerdicts, VerdictSource
from sglang_parse.policy.in_a_row import has_time
from sglang_parse.policy.planner import RoundPlanner
from sglang_parse.reporting.drafters import tokens_behind
from sglang_parse.requests.round_records import Round
from sglang_parse.verify.layout import VerifyPlan


class RoundEngine:
    """Runs rounds. It keeps nothing of any request."""

    def __init__(
        self,
        *,
        target: Target,
        slots: Slots,
        drafters: GuardedDrafters,
        planner: RoundPlanner,
        segmenting: Segmenting,
        ranks: RankAgreement,
        verdicts: VerdictSource | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """verdicts: by default each has a judge suffix. clock: seconds."""
        self.target = target
        self.slots = slots
        self.drafters = drafters
        self.planner = planner
        self.segmenting = segmenting
        self.ranks = ranks
        self.verdicts = verdicts or SuffixVerdicts()
        self.clock = clock
        #: When the last round ended, None where other work followed it.
        self._ended: float | None = None

    def interrupt(self) -> None:
        """The next round does not begin right behind the last one."""
        self._ended = None

    def run_row(self, open_round: Callable[[], Round]) -> list[Round]:
        """Rounds of the same requests right behind each other. What all but the last
        one decide is `ready` then, and is emitted with what that decides.

        open_round: these requests as they stand.
        """
        started = began = self.clock()
        rounds = [open_round()]
        self.run(rounds[0])
        while self.planner.may_follow(rounds[-1]):
            ended = self.clock()
            is_late = not has_time(ended - started, ended - began)
            if self._is_due(rounds[-1], is_late=is_late):
                break
            for r in rounds[-1]:
                r.state.ready = (*r.state.ready, *r.decision.accept_tokens)
            began = ended
            rounds.append(open_round())
            self.run(rounds[-1])
        return rounds

    def _is_due(self, round: Round, *, is_late: bool = False) -> bool:
        """Whether the scheduler has to be asked now. The first rank knows."""
        return bool(self.ranks.agree(int(is_late or round.has_mail())))

    def run(self, round: Round) -> None:
        """Plan, draft, segment, lay out, one pass, score, cut, follow, commit, observe.

        Fills the records of `round`. Nothing is emitted for a request whose `error` is
        set afterwards.
        """
        started = self.clock()
        if self._ended is not None:
            round.between = started - self._ended
        self.verdicts.open(round)
        self.planner.plan(round)
        if not any(r.window for r in round):
            self.target.look_ahead(round)
        self.draft(round)
        drafted = self.clock()
        if not round.is_drafted:
            self._run_plain(round, started)
            return
        round.num_steps, round.goes_on = 1, False
        self.segment(round)
        plan = lay_out(round)
        planned = self.clock()
        self.verify(round, plan)
        scored = self.clock()
        follow_target(round, self.target)
        self.commit(round)
        self.planner.adapt(round)
        self.drafters.after_pass(round)
        self._ended = ended = self.clock()
        round.seconds = {
            "draft": drafted - started,
            "layout": planned - drafted,
            "verify": scored - planned,
            "decide": ended - scored,
        }
        self.planner.observe(round)

    def _run_plain(self, round: Round, started: float) -> None:
        """No draft has a token: the target's ordinary decode steps."""
        drafted = self.clock()
        decode(round, self.target, partial(self._is_due, round))
        self.commit(round)
        for r in round:
            r.state.follow_verdict(len(r.decision.accept_tokens), 0)
        decided = self.clock()
        self.drafters.after_pass(round)
        self._ended = ended = self.clock()
        # What a plain round takes where nothing reads on behind it.
        round.seconds = {
            "draft": drafted - started,
            "plain": decided - drafted,
            "follow": ended - decided,
        }
        self.planner.observe(round)

    # -- Stages ----------------------------------------------------------------

    def draft(self, round: Round) -> None:
        """Every drafter in its turn, behind what is pending."""
        wanted = [
            r.seq_len + max(r.num_columns, round.num_steps + round.goes_on)
            for r in round
        ]
        self.slots.extend_rows(round.batch, wanted)
        try:
            for r in round:
                guard(r, pending_draft)
            self.drafters.draft(round)
        finally:
            for r in round:
                if r.grammar is not None:
                    r.grammar.rewind()

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
        """Remember what is pending and what the target has to rewrite, and tell the
        reports; free slots, and leave a recurrent state at what was kept."""
        keep = []
        for r in round:
            guard(r, self.segmenting.recover)
            guard(r, partial(record, reason=round.reason))
            pending = r.decision.pending
            num_client = r.draft.num_client - len(r.decision.accept_tokens)
            r.state.keep_pending(
                pending,
                ended=r.draft.ended,
                num=num_client,
                written_by=tokens_behind(r.draft.written_by, max(0, -num_client)),
            )
            keep.append(r.new_len + len(pending) + bool(pending))
        self.slots.trim_rows(round.batch, keep)
        self.target.keep(round)
