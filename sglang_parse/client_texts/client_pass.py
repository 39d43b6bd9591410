"""Clients' texts judged right behind their prompts, one pass a step of the scheduler.

A draft of a drafter follows the target's first token; a client's text follows the
prompt. So its pass starts at the prompt's last token, behind the prefill. A text that
is to be kept is judged at once, before its first token is sent. A text that is judged
alone (`parse_verify`) may need several passes: each takes a step of its own, and other
requests are served between them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

from sglang_parse.client_texts.client_drafts import Bounds, Text, draft_of
from sglang_parse.client_texts.verifications import Verifications
from sglang_parse.drafting.drafter import Prefill
from sglang_parse.engine.failures import guard
from sglang_parse.engine.outcome import follow_target, record
from sglang_parse.engine.round import RoundEngine
from sglang_parse.engine.shown import lay_out
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.refusal import Refusal, cannot_judge, internal_error
from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.requests.state import RequestState
from sglang_parse.sgl.fast_paths import PassFailed
from sglang_parse.sgl.scheduler_types import (
    RoundBatch,
    SchedulerBatch,
    SchedulerRequest,
)


class ClientPass:
    """Judges clients' texts with the stages of a round.

    view: (SGLang's batch, indices) -> the batch of these requests alone. refuse: ends
    a request with an error. bar: keeps its KV out of the radix cache. hold, release:
    let a request wait for its verdicts without output, and end it. step_rows: of the
    longest prefill; texts that are judged alone have no more in a step, but for one
    verdict.
    """

    def __init__(
        self,
        engine: RoundEngine,
        *,
        context_len: int,
        view: Callable[[SchedulerBatch, Sequence[int]], RoundBatch],
        refuse: Callable[[SchedulerRequest, Refusal], None],
        bar: Callable[[SchedulerRequest], None],
        hold: Callable[[SchedulerRequest], None],
        release: Callable[[SchedulerRequest], None],
        step_rows: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.context_len = context_len
        self.view = view
        self.refuse = refuse
        self.bar = bar
        self.hold = hold
        self.clock = clock
        self.verifications = Verifications(
            engine.ranks,
            refuse=refuse,
            release=release,
            page_size=engine.slots.page_size,
            step_rows=step_rows,
            clock=clock,
        )

    def begin(self, prefill: Prefill) -> list[tuple[int, int]]:
        """Behind a prefill: judge the texts that came with its requests.

        Returns (place in the batch, first token) of each request whose text becomes
        output; the tokens behind it are `ready` for the next round.
        """
        batch = prefill.batch
        texts = [
            Text(i, one.req, one.state, one.row)
            for i, one in enumerate(prefill.requests)
            if one.state is not None and one.has_text
        ]
        kept, alone = self._admit(batch, texts)
        left = kept
        while left or alone:
            now, left = self._next(batch, left)
            self._pass(batch, now, [] if left else alone)
            if not left:
                break
        for text in alone:
            if text.state.verification is not None:
                self.hold(text.req)
        first = [
            (text.index, r.decision.accept_tokens[0])
            for text, r in kept
            if not self._failed(r)
        ]
        for text in texts:
            # A single token is left to the pass (`PrefillEngine`).
            is_left = prefill.requests[text.index].num_computed == 1
            if is_left and not has_run(text):
                self.bar(text.req)
        return first

    def go_on(self, batch: SchedulerBatch, states: Sequence[RequestState]) -> None:
        """One pass more for requests that wait for verdicts. states: of the batch."""
        rows = batch.req_pool_indices_cpu.tolist()
        waiting = [
            Text(i, req, state, rows[i])
            for i, (req, state) in enumerate(zip(batch.reqs, states, strict=True))
            if state.verification is not None
        ]
        self._pass(batch, [], waiting)

    # -- Admission -------------------------------------------------------------

    def _admit(
        self, batch: SchedulerBatch, texts: Sequence[Text]
    ) -> tuple[list[tuple[Text, RequestRound]], list[Text]]:
        """Texts that become output, and those judged alone, which are drafts now."""
        kept, alone = [], []
        for text in texts:
            r = text.round()
            if not text.state.options.verify_only:
                kept.append((text, r))
                continue
            try:
                draft_of(r, self.engine.segmenting, self._bounds(batch))
            except Refusal as refusal:
                self.refuse(text.req, refusal)
                continue
            self.verifications.begin(text, r)
            alone.append(text)
        return kept, alone

    def _bounds(self, batch: SchedulerBatch) -> Bounds:
        slots = self.engine.slots
        return Bounds(
            context_len=self.context_len,
            num_free=slots.num_free(batch.tree_cache, 2),
            num_slots=slots.num_slots - 2 * (slots.page_size - 1),
            max_rows=slots.max_rows,
        )

    def _room(self, batch: SchedulerBatch, num_texts: int) -> int:
        """Rows of a pass that there are slots for, where so many texts take slots, each
        one more than it has rows (`columns_of`), and all suffixes together."""
        slots = self.engine.slots
        free = slots.num_free(batch.tree_cache, num_texts + 1) - num_texts
        return min(free, slots.max_rows)

    def _next(
        self, batch: SchedulerBatch, texts: list[tuple[Text, RequestRound]]
    ) -> tuple[list[tuple[Text, RequestRound]], list[tuple[Text, RequestRound]]]:
        """The first texts that fit into one pass, at least one, and the others.

        What an earlier pass kept took slots: each text is cut to what fits now.
        """
        room, total = self._room(batch, len(texts)) * 3 // 4, 0
        bounds = self._bounds(batch)
        for _, r in texts:
            draft_of(r, self.engine.segmenting, bounds)
        for num, (_, r) in enumerate(texts):
            total += 1 + len(r.draft.tokens) + len(r.state.suffix)
            if num and total > room:
                return texts[:num], texts[num:]
        return texts, []

    # -- One pass --------------------------------------------------------------

    def _pass(
        self,
        batch: SchedulerBatch,
        kept: Sequence[tuple[Text, RequestRound]],
        waiting: Sequence[Text],
    ) -> None:
        """Judge texts to keep, and as much of the others as there is room for."""
        slots, room = self.engine.slots, self._room(batch, len(kept))
        num_kept = share_verdicts([r for _, r in kept], room)
        room -= num_kept
        chosen = [*kept, *self.verifications.parts(waiting, room, num_kept)]
        if not chosen:
            return
        started = self.clock()
        chosen.sort(key=lambda pair: pair[0].index)
        view = self.view(batch, [text.index for text, _ in chosen])
        round = Round(view, [r for _, r in chosen])
        slots.extend_rows(view, [columns_of(r) for r in round])
        plan = lay_out(round)
        try:
            self.engine.verify(round, plan)
        except PassFailed as error:
            # Those whose text becomes output end behind this, in `begin`.
            for text, r in chosen:
                if text.state.verification is not None:
                    self.verifications.end(text, cannot_judge(str(error)))
                r.fail(error)
            slots.trim_rows(view, [r.seq_len + 1 for r in round])
            return
        self._keep(batch, round, [text.index for text, _ in kept])
        seconds = self.clock() - started
        for text, r in chosen:
            if text.state.verification is not None:
                self.verifications.settle(text, r, seconds)
        slots.trim_rows(view, [end_of(r) for r in round])

    def _keep(self, batch: SchedulerBatch, round: Round, index: Sequence[int]) -> None:
        """Decide what is kept of the texts that become output."""
        kept = [r for r in round if r.state.verification is None]
        if not kept:
            return
        part = Round(self.view(batch, sorted(index)), kept, output=round.output)
        follow_target(part, self.engine.target)
        for r in part:
            guard(r, self.engine.segmenting.recover)
            pending = r.decision.pending
            r.state.ready = r.decision.accept_tokens[1:]
            r.state.draft = Draft(pending, num_client=len(pending))
            guard(r, record)
        self.engine.drafters.after_pass(part)

    def _failed(self, r: RequestRound) -> bool:
        """End a request of which a stage raised; it has no token to send."""
        if r.error is not None:
            self.refuse(r.req, internal_error(r.error))
        return r.error is not None


def has_run(text: Text) -> bool:
    """Whether a text's pass has run, as far as this is sure."""
    one = text.state.verification
    return text.req.to_finish is None and (one is None or one.num_passes > 0)


def share_verdicts(texts: Sequence[RequestRound], room: int) -> int:
    """Leave each text the boundaries there is room for; what cannot be judged is not
    kept. Returns the rows that they take."""
    left = room - sum(1 + len(r.draft.tokens) for r in texts)
    total = room - left
    for num_left, r in zip(range(len(texts), 0, -1), texts, strict=True):
        suffix_len = len(r.state.suffix)
        most = max(0, left // num_left // suffix_len)
        r.segments = replace(r.segments, boundaries=r.segments.boundaries[:most])
        taken = len(r.segments.boundaries) * suffix_len
        left, total = left - taken, total + taken
    return total


def columns_of(r: RequestRound) -> int:
    """Columns of the request's row in a pass. Behind a text that is kept come the token
    that follows it and the one behind that: SGLang, which knows of the prompt alone,
    reserves no slot of the next round for them."""
    num = len(r.shown)
    num_behind = 0 if r.state.options.verify_only else 2 * bool(num)
    return r.seq_len + 1 + num + num_behind


def end_of(r: RequestRound) -> int:
    """Columns of the request's row that hold what was decided and what is pending."""
    return r.new_len + 1 + len(r.state.pending)
