"""A drafter that has another server write: its text becomes tokens of the target.

Each request has a stream that continues its text. A round takes what has arrived and
never waits. Where the answer leaves the streamed text, a new stream begins there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from functools import partial

from sglang_parse.api import (
    Drafter,
    DrafterContext,
    DrafterResources,
    Prefill,
    RequestRound,
    Round,
)
from sglang_parse.drafting.drafter import room_for
from sglang_parse.drafting.text_bridge import DraftWriter, TextEncoder, unfinished
from sglang_parse.options.validation import DRAFT_KEY_ENV
from sglang_parse.remote.breaker import Breaker
from sglang_parse.remote.remote_streams import RemoteStreams
from sglang_parse.remote.streamed_answer import StreamedAnswer
from sglang_parse.reporting.telemetry import TELEMETRY
from sglang_parse.requests.state import RequestState
from sglang_parse.sgl.ranks import Ranks
from sglang_parse.sgl.scheduler_types import SchedulerRequest

logger = logging.getLogger(__name__)

UNREACHABLE = "draft_unreachable"
# Tokens that a stream may have: of a server that has not helped lately, and at most.
# Each useful stream doubles them. What a wrong server sends is read for nothing.
FIRST_TOKENS, STREAM_TOKENS = 64, 512
# Seconds within which the text of a new stream is expected.
SOON_S = 0.1
# Bytes of text for each token that may be written.
BYTES_A_TOKEN = 8
# Useless streams in a row, over all requests, before there is a pause, and its seconds
# at first and at most.
MAX_USELESS = 8
USELESS_S, LONGEST_USELESS_S = 0.5, 30.0


class RemoteDrafter(Drafter):
    """The server of `--speculative-parse-draft-url`. Its drafts are judged."""

    name = "remote"
    token_level = False

    def __init__(
        self,
        streams: RemoteStreams | None,
        encoder: TextEncoder,
        ranks: Ranks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """streams: None on all ranks but the first. encoder: of the target."""
        self.streams = streams
        self.ranks = ranks
        self.pieces = encoder.pieces
        self.writer = DraftWriter(encoder)
        self.answers: dict[RequestState, StreamedAnswer] = {}
        self._clock = clock
        #: Open where the streams of all requests are useless.
        self._worth = Breaker(
            clock, most=MAX_USELESS, rest_s=USELESS_S, longest_s=LONGEST_USELESS_S
        )
        self._is_useless = False
        self._max_tokens = FIRST_TOKENS
        #: Whether there is text, the same on all ranks. Where there is none, rounds are
        #: as if there were no draft server.
        self._gives = True
        self._is_told = False

    @classmethod
    def create(cls, context: DrafterContext) -> RemoteDrafter:
        """The entry point (`drafting.create_drafters`)."""
        config, streams = context.config, None
        if context.ranks.is_first:
            streams = RemoteStreams(
                config.draft_url,
                model=config.draft_url_model,
                key=os.environ.get(DRAFT_KEY_ENV, ""),
                count=partial(TELEMETRY.count, "draft_streams", 1),
            )
        return cls(streams, TextEncoder(context.tokenizer), context.ranks)

    def open(self, resources: DrafterResources) -> None:
        if self.streams is not None:
            self.streams.look_up()

    def can_draft(self, r: RequestRound) -> bool:
        return self._gives and r.req.input_embeds is None

    # -- A round -----------------------------------------------------------------

    def before_prefill(self, prefill: Prefill) -> None:
        """The server may read the prompt while the target does."""
        self._gives = True
        if self.streams is None:
            return
        fresh = {id(one.req) for one in prefill.requests}
        self._close(lambda one: id(one.req) in fresh or one.req.finished())
        for item in prefill.requests:
            req, state = item.req, item.state
            if state is None or state.options.mode == "off" or req.input_embeds:
                continue
            if not state.options.verify_only:
                answer = self._remember(state, req)
                self._catch_up(answer, req.output_ids)
                self._begin(answer)

    def draft(self, round: Round) -> None:
        """Write what has arrived. Every rank takes what the first one read."""
        found = [self._found(r) for r in round]
        sizes, ends = self.ranks.agree_all(
            [[len(tokens) for tokens, _ in found], [int(ended) for _, ended in found]]
        )
        written = self.ranks.agree_all(
            [
                tokens if self.streams is not None else [0] * num
                for (tokens, _), num in zip(found, sizes, strict=True)
            ]
        )
        for r, tokens, ended in zip(round, written, ends, strict=True):
            if tokens or ended:
                r.draft = r.draft.extended(
                    self.name, tokens, ended=bool(ended), token_level=False
                )

    def after_pass(self, round: Round) -> None:
        """Follow the answers: end streams that they have left, and begin others."""
        if self.streams is not None:
            self._close(lambda answer: answer.req.finished())
            for r in round:
                self._follow(r)
        self._gives = bool(self.ranks.agree(int(self._gives_text())))

    def _found(self, r: RequestRound) -> tuple[Sequence[int], bool]:
        """New tokens of a request, and whether its answer ends with them. Never raises,
        since all ranks wait for the first."""
        try:
            answer = self.answers.get(r.state)
            return self._read(r, answer) if answer is not None else ((), False)
        except Exception:
            self._tell_once()
            return (), False

    def _read(
        self, r: RequestRound, answer: StreamedAnswer
    ) -> tuple[Sequence[int], bool]:
        self._catch_up(answer, [*r.req.output_ids, *r.state.ready])
        room, stream = room_for(r, self.name), answer.stream
        if stream is None or not room:
            return (), False
        known = answer.written + self.pieces.join(r.draft.tokens)
        has_ended = stream.has_ended  # before its text is read
        text = bytes(stream.text)
        if not text.startswith(known):
            return (), False
        new = text[len(known) : len(known) + room * BYTES_A_TOKEN]
        whole = has_ended and len(known) + len(new) == len(text)
        tokens = self.writer.write(new, most=room, whole=whole)
        ended = whole and len(self.pieces.join(tokens)) == len(new)
        return tokens, ended and bool(r.state.stop_ids)

    def _follow(self, r: RequestRound) -> None:
        """What became of a request in the round."""
        if not r.limit or r.is_at_its_end or self.name in r.state.failed_drafters:
            return
        try:
            answer = self.answers.get(r.state) or self._remember(r.state, r.req)
            decided = [*r.state.ready, *r.decision.accept_tokens]
            self._catch_up(answer, [*r.req.output_ids, *decided])
            self._renew(answer)
            self._report(r.state, answer)
        except Exception:
            self._tell_once()

    def _report(self, state: RequestState, answer: StreamedAnswer) -> None:
        """The report says that there is no draft, for as long as that is so."""
        report = state.report
        if self.name in report.drafters.drafted:
            if report.fallback == UNREACHABLE:
                report.fallback = ""
        elif answer.has_failed or not (self.streams and self.streams.is_up):
            report.fallback = report.fallback or UNREACHABLE

    def _tell_once(self) -> None:
        if not self._is_told:
            logger.exception("PARSE: drafter %s failed for a request", self.name)
        self._is_told = True

    # -- Streams -----------------------------------------------------------------

    def _remember(self, state: RequestState, req: SchedulerRequest) -> StreamedAnswer:
        prompt = self.pieces.join(req.origin_input_ids).decode(errors="replace")
        answer = self.answers[state] = StreamedAnswer(req, prompt)
        return answer

    def _catch_up(self, answer: StreamedAnswer, output: Sequence[int]) -> None:
        new = output[answer.num_output :]
        answer.text += self.pieces.join(new)
        answer.num_output += len(new)

    def _renew(self, answer: StreamedAnswer) -> None:
        """End a stream that the answer has left; begin one where there is none."""
        stream, now = answer.stream, self._clock()
        if stream is not None and answer.has_left(stream):
            self._let_go(answer)
            answer.settle(stream, now)
        if answer.stream is None and now >= answer.not_before:
            self._begin(answer)

    def _begin(self, answer: StreamedAnswer) -> None:
        left = answer.req.sampling_params.max_new_tokens - answer.num_output
        if left < 2 or unfinished(answer.text[-4:]) or not self._may_begin():
            return
        assert self.streams is not None
        answer.start, answer.begun = len(answer.text), self._clock()
        text = answer.prompt + answer.text.decode(errors="replace")
        answer.stream = self.streams.begin(text, min(left, self._max_tokens))
        if answer.stream is None:
            answer.not_before = self._clock() + answer.pause_s

    def _gives_text(self) -> bool:
        """Whether text has arrived or is about to, on the first rank."""
        if self.streams is None or not self.streams.is_up:
            return False
        soon = self._clock() - SOON_S
        return any(one.has_unread or one.begun > soon for one in self.answers.values())

    def _may_begin(self) -> bool:
        """Where streams are useless, one is tried at a time."""
        if self._worth.is_open:
            return False
        others = self.answers.values() if self._worth.is_failing else ()
        return all(one.stream is None for one in others)

    def _close(self, is_gone: Callable[[StreamedAnswer], bool]) -> None:
        for state, answer in list(self.answers.items()):
            if is_gone(answer):
                del self.answers[state]
                self._catch_up(answer, answer.req.output_ids)
                self._let_go(answer)

    def _let_go(self, answer: StreamedAnswer) -> None:
        """End its stream, and learn whether streams are useful."""
        stream, answer.stream = answer.stream, None
        if stream is None or self.streams is None:
            return
        self.streams.end(stream)
        useful = answer.is_useful(stream)
        if useful:
            self._worth.succeed()
            self._is_useless = False
            self._max_tokens = min(2 * self._max_tokens, STREAM_TOKENS)
        elif useful is False:
            self._max_tokens = FIRST_TOKENS
            if self._worth.fail() and not self._is_useless:
                self._is_useless = True
                logger.warning(
                    "PARSE: %d streams of the draft server in a row were of no use; "
                    "it is asked rarely until one is.",
                    MAX_USELESS,
                )
