"""Texts that are judged alone (`parse_verify`), over as many passes as they need.

`ClientPass` computes the passes. Here is what each of them takes of which text, and
what becomes of the verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from sglang_parse.client_texts.client_drafts import Text, cost, fitting
from sglang_parse.engine.failures import guard
from sglang_parse.engine.outcome import choose_cut_of, record_of
from sglang_parse.judging.decide import Decision
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.refusal import (
    Refusal,
    bad_request,
    cannot_judge,
    internal_error,
    try_again,
)
from sglang_parse.requests.round_records import Kept, RequestRound, Segments, Verdict
from sglang_parse.sgl.ranks import Ranks
from sglang_parse.sgl.scheduler_types import SchedulerRequest

# Seconds that the passes over one text may take in all.
MAX_VERIFY_SECONDS = 120.0


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


class Verifications:
    """Divides texts among passes, and ends each request with its last verdict.

    refuse: ends a request with an error. release: ends a request that has its
    verdicts. page_size: KV slots of a page. step_rows: of the longest prefill; a pass
    has no more rows of these texts, but for one verdict. clock: seconds.
    """

    def __init__(
        self,
        ranks: Ranks,
        *,
        refuse: Callable[[SchedulerRequest, Refusal], None],
        release: Callable[[SchedulerRequest], None],
        page_size: int,
        step_rows: int,
        clock: Callable[[], float],
    ) -> None:
        self.ranks = ranks
        self.refuse = refuse
        self.release = release
        self.page_size = page_size
        self.step_rows = step_rows
        self.clock = clock

    def begin(self, text: Text, r: RequestRound) -> None:
        """Take in a text whose draft and boundaries are known."""
        text.state.verification = Verification(
            r.draft, r.segments.boundaries, self.clock()
        )

    # -- Before a pass ---------------------------------------------------------

    def parts(
        self, waiting: Sequence[Text], room: int, num_kept: int
    ) -> list[tuple[Text, RequestRound]]:
        """What the next pass judges of the texts that wait, in `room` rows.

        Those with the fewest passes come first. There is at least one verdict, and
        otherwise no more rows than a prefill has, `num_kept` others included.
        """
        timely = max(0, self.step_rows - num_kept)
        chosen: list[tuple[Text, RequestRound]] = []
        unused = self.page_size - 1  # of the last page of a text
        order = sorted(waiting, key=lambda text: text.state.verification.num_passes)
        for text in order:
            r = self._part(text, room - unused, timely, is_first=not chosen)
            if r is not None:
                taken = cost(r, r.segments.boundaries)
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
        r.segments = Segments(part)
        return r

    # -- Behind a pass ---------------------------------------------------------

    def settle(self, text: Text, r: RequestRound, seconds: float) -> None:
        """Take the verdicts of a pass; what that raises ends this request alone."""
        guard(r, lambda r: self._note(text, r, seconds))
        if r.error is not None:
            self.end(text, internal_error(r.error))

    def _note(self, text: Text, now: RequestRound, seconds: float) -> None:
        """Add the verdicts of a pass; end the request with the last of them."""
        one: Verification = text.state.verification
        if now.verdict.has_failed:  # the judge failed, which is counted and logged
            self.end(text, cannot_judge("the judge failed"))
            return
        one.scores += now.verdict.scores
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
            self.end(text, bad_request(message))

    def _complete(self, text: Text, one: Verification) -> None:
        r = text.round()
        r.draft, r.segments = one.draft, Segments(one.boundaries)
        r.verdict = Verdict(one.scores, num_passes=one.num_passes)
        cut = choose_cut_of(r)
        r.kept = Kept(cut, Decision((), cut.num_kept, 0, ()))
        r.state.report.record(record_of(r))
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
            self.end(text, try_again(message))

    def _exceeds(self, seconds: float) -> bool:
        """Whether the first rank has measured too long: all ranks end a request
        together."""
        measured = [[int(seconds > MAX_VERIFY_SECONDS)]]
        return bool(self.ranks.agree_all(measured)[0][0])

    def end(self, text: Text, refusal: Refusal) -> None:
        """Without verdicts."""
        text.state.verification = None
        self.refuse(text.req, refusal)
