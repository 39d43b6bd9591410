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
from dataclasses import dataclass, replace

from sglang_parse.engine.client_text import Bounds, cost, draft_of, fitting
from sglang_parse.engine.failures import guard
from sglang_parse.engine.outcome import (
    choose_cuts,
    cut_of,
    follow_target,
    record,
    record_of,
)
from sglang_parse.engine.round import RoundEngine
from sglang_parse.engine.shown import lay_out
from sglang_parse.judging.decide import Decision
from sglang_parse.requests.refusal import (
    Refusal,
    bad_request,
    cannot_judge,
    internal_error,
    try_again,
)
from sglang_parse.requests.round import Draft, RequestRound, Round
from sglang_parse.requests.state import RequestState
from sglang_parse.runtime.protocols import (
    RoundBatch,
    SchedulerBatch,
    SchedulerRequest,
)

# Seconds that the passes over one text may take in all.
MAX_VERIFY_SECONDS = 120.0
# Seconds that a pass over texts that are judged alone is to take: others wait for it,
# and probes of /health give up after 20 s. One verdict is always judged.
STEP_SECONDS = 4.0
# Rows of such a pass before any was timed.
FIRST_ROWS = 512


@dataclass
class Verification:
    """A text that is judged alone, while its verdicts are not complete.

    It is kept in `RequestState.verification`, so it refers to no request.
    """

    draft: Draft
    boundaries: tuple[int, ...]
    #: When it was first seen or last judged, in seconds of the clock.
    since: float
    #: Verdicts so far, of the first boundaries.
    scores: tuple[float, ...] = ()
    num_passes: int = 0
    #: Seconds that its passes took.
    seconds: float = 0.0

    @property
    def left(self) -> tuple[int, ...]:
        """Boundaries without a verdict."""
        return self.boundaries[len(self.scores) :]


@dataclass(frozen=True)
class Text:
    """A request of a batch with a client's text behind its prompt."""

    #: Its place in the batch.
    index: int
    req: SchedulerRequest
    state: RequestState
    #: Its row of req_to_token.
    row: int

    def round(self) -> RequestRound:
        """A record whose pass starts at the prompt's last token."""
        prompt = self.req.origin_input_ids
        return RequestRound(
            self.req, self.state, self.row, len(prompt) - 1, prompt[-1], output_len=0
        )


class ClientPass:
    """Judges clients' texts with the stages of a round.

    view: (SGLang's batch, indices) -> the batch of these requests alone. refuse: ends
    a request with an error. hold, release: let a request wait for its verdicts without
    output, and end it. step_rows: of the longest prefill; texts that are judged alone
    have no more in a step, but for one verdict.
    """

    def __init__(
        self,
        engine: RoundEngine,
        *,
        context_len: int,
        view: Callable[[SchedulerBatch, Sequence[int]], RoundBatch],
        refuse: Callable[[SchedulerRequest, Refusal], None],
        hold: Callable[[SchedulerRequest], None],
        release: Callable[[SchedulerRequest], None],
        step_rows: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.engine = engine
        self.context_len = context_len
        self.view = view
        self.refuse = refuse
        self.hold = hold
        self.release = release
        self.step_rows = step_rows
        self.clock = clock
        #: Seconds that a row of a pass takes here, 0 before any was timed.
        self.row_seconds = 0.0

    def begin(
        self, batch: SchedulerBatch, texts: Sequence[Text]
    ) -> list[tuple[int, int]]:
        """Behind a prefill: judge the texts that came with its requests.

        Returns (place in the batch, first token) of each request whose text becomes
        output; the tokens behind it are `ready` for the next round.
        """
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
        return [
            (text.index, r.decision.accept_tokens[0])
            for text, r in kept
            if not self._failed(r)
        ]

    def go_on(self, batch: SchedulerBatch, waiting: Sequence[Text]) -> None:
        """One pass more for requests that wait for verdicts."""
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
            text.state.verification = Verification(r.draft, r.boundaries, self.clock())
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
        """Rows of a pass that there are slots for, where so many texts take slots, and
        all suffixes together."""
        slots = self.engine.slots
        return min(slots.num_free(batch.tree_cache, num_texts + 1), slots.max_rows)

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
        chosen = [*kept, *self._parts(waiting, room, self._timely_rows(num_kept))]
        if not chosen:
            return
        started = self.clock()
        chosen.sort(key=lambda pair: pair[0].index)
        view = self.view(batch, [text.index for text, _ in chosen])
        round = Round(view, [r for _, r in chosen])
        shown = [len(r.shown) for r in round]
        # Behind a text comes the token that follows it.
        lens = [r.seq_len + 1 + n + bool(n) for r, n in zip(round, shown, strict=True)]
        slots.extend_rows(view, lens)
        plan = lay_out(round)
        self.engine.verify(round, plan)
        self._keep(batch, round, [text.index for text, _ in kept])
        seconds = self.clock() - started
        latest = seconds / max(1, plan.num_verify_tokens)
        self.row_seconds = (self.row_seconds or latest) / 2 + latest / 2
        for text, r in chosen:
            if text.state.verification is not None:
                self._settle(text, r, seconds)
        slots.trim_rows(view, [end_of(r) for r in round])

    def _timely_rows(self, num_kept: int) -> int:
        """Rows for texts that are judged alone, beside `num_kept` others; by the first
        rank's clock, as all ranks lay out the same pass."""
        known = self.row_seconds
        rows = round_down(STEP_SECONDS / known) if known else FIRST_ROWS
        rows = min(rows, self.step_rows)
        return max(0, self.engine.ranks.agree_all([[rows]])[0][0] - num_kept)

    def _parts(
        self, waiting: Sequence[Text], room: int, timely: int
    ) -> list[tuple[Text, RequestRound]]:
        """What is judged of the texts that wait: those with the fewest passes first, at
        least one verdict and otherwise `timely` rows, in `room` rows."""
        chosen: list[tuple[Text, RequestRound]] = []
        unused = self.engine.slots.page_size - 1  # of the last page of a text
        order = sorted(waiting, key=lambda text: text.state.verification.num_passes)
        for text in order:
            r = self._part(text, room - unused, timely, is_first=not chosen)
            if r is not None:
                taken = cost(r, r.boundaries)
                room, timely = room - taken - unused, timely - taken
                chosen.append((text, r))
        return chosen

    def _part(
        self, text: Text, room: int, timely: int, *, is_first: bool
    ) -> RequestRound | None:
        """As many of the verdicts that are left as fit into the rows."""
        one: Verification = text.state.verification
        if text.req.to_finish is not None:
            text.state.verification = None
            return None
        r = text.round()
        part = fitting(one.left, len(r.state.suffix), min(room, timely))
        if not part and is_first:
            part = fitting(one.left[:1], len(r.state.suffix), room)
        if not part:
            self._give_up_waiting(text, one)
            return None
        r.draft = replace(one.draft, tokens=one.draft.tokens[: part[-1]])
        r.boundaries = part
        return r

    def _keep(self, batch: SchedulerBatch, round: Round, index: Sequence[int]) -> None:
        """Decide what is kept of the texts that become output."""
        kept = [r for r in round if r.state.verification is None]
        if not kept:
            return
        part = Round(self.view(batch, sorted(index)), kept, output=round.output)
        choose_cuts(part)
        follow_target(part, self.engine.target)
        for r in part:
            guard(r, self.engine.segmenting.recover)
            pending = r.decision.pending
            r.state.ready = r.decision.accept_tokens[1:]
            r.state.keep_pending(pending, ended=False, num=len(pending))
            guard(r, record)
        self.engine.drafters.after_pass(part)

    def _failed(self, r: RequestRound) -> bool:
        """End a request of which a stage raised; it has no token to send."""
        if r.error is not None:
            self.refuse(r.req, internal_error(r.error))
        return r.error is not None

    # -- Texts that are judged alone -------------------------------------------

    def _settle(self, text: Text, r: RequestRound, seconds: float) -> None:
        """Take the verdicts of a pass; what that raises ends this request alone."""
        guard(r, lambda r: self._note(text, r, seconds))
        if r.error is not None:
            self._end(text, internal_error(r.error))

    def _note(self, text: Text, now: RequestRound, seconds: float) -> None:
        """Add the verdicts of a pass; end the request with the last of them."""
        one: Verification = text.state.verification
        if not now.scores:  # the judge failed, which is counted and logged
            self._end(text, cannot_judge("the judge failed"))
            return
        one.scores += now.scores
        one.num_passes += 1
        one.seconds += seconds
        one.since = self.clock()
        if not one.left:
            self._complete(text, one)
        elif self._exceeds(one.seconds):
            message = (
                f"custom_params.parse_verify asks for {len(one.boundaries)} verdicts "
                f"and {len(one.scores)} of them took {one.seconds:.0f} s; expected at "
                f"most {MAX_VERIFY_SECONDS:.0f} s for all: give fewer segments or a "
                "shorter custom_params.parse_judge_suffix."
            )
            self._end(text, bad_request(message))

    def _complete(self, text: Text, one: Verification) -> None:
        r = text.round()
        r.draft, r.boundaries, r.scores = one.draft, one.boundaries, one.scores
        r.cut = cut_of(r)
        r.decision = Decision((), r.cut.num_kept, 0, ())
        r.state.report.record(replace(record_of(r), num_passes=one.num_passes))
        text.state.verification = None
        self.release(text.req)

    def _give_up_waiting(self, text: Text, one: Verification) -> None:
        """There is no room now, and nobody waits for ever."""
        waited = self.clock() - one.since
        if self._exceeds(waited):
            message = (
                f"custom_params.parse_verify waited {waited:.0f} s for room beside the "
                "requests that run now"
            )
            self._end(text, try_again(message))

    def _exceeds(self, seconds: float) -> bool:
        """Whether the first rank has measured too long: all ranks end a request
        together."""
        measured = [[int(seconds > MAX_VERIFY_SECONDS)]]
        return bool(self.engine.ranks.agree_all(measured)[0][0])

    def _end(self, text: Text, refusal: Refusal) -> None:
        text.state.verification = None
        self.refuse(text.req, refusal)


def round_down(rows: float) -> int:
    """Rows as a whole number that every rank can hold."""
    return int(min(rows, 1 << 30))


def share_verdicts(texts: Sequence[RequestRound], room: int) -> int:
    """Leave each text the boundaries there is room for; what cannot be judged is not
    kept. Returns the rows that they take."""
    left = room - sum(1 + len(r.draft.tokens) for r in texts)
    total = room - left
    for num_left, r in zip(range(len(texts), 0, -1), texts, strict=True):
        suffix_len = len(r.state.suffix)
        r.boundaries = r.boundaries[: max(0, left // num_left // suffix_len)]
        taken = len(r.boundaries) * suffix_len
        left, total = left - taken, total + taken
    return total


def end_of(r: RequestRound) -> int:
    """Columns of the request's row that hold what was decided and what is pending."""
    return r.new_len + 1 + len(r.state.pending)
