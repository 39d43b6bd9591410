"""A draft from a remote server: text that it streams, as the target's tokens.

Each request has a stream that goes on from its text. A round takes what has come and
never waits. Where the answer leaves the streamed text, a new stream begins there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

from torch import Tensor

from sglang_parse.drafting.base import DrafterContext, DrafterResources, Prefill
from sglang_parse.drafting.breaker import Breaker
from sglang_parse.drafting.remote_memory import (
    FIRST_PAUSE_S,
    LONGEST_PAUSE_S,
    Memory,
    chat_of,
    given_by,
    has_left,
    is_useful,
    was_worth_it,
)
from sglang_parse.drafting.remote_streams import RemoteStreams
from sglang_parse.drafting.runner import DraftRunner
from sglang_parse.drafting.text_bridge import (
    DraftWriter,
    TextEncoder,
    unfinished,
)
from sglang_parse.drafting.thinking import Marks, Thinking, marks_of
from sglang_parse.options.server import DRAFT_KEY_ENV
from sglang_parse.reporting.telemetry import TELEMETRY
from sglang_parse.requests.round import RequestRound, Round
from sglang_parse.requests.state import RequestState
from sglang_parse.runtime.protocols import SchedulerRequest
from sglang_parse.runtime.ranks import Ranks

logger = logging.getLogger(__name__)

UNREACHABLE = "draft_unreachable"
# Tokens asked for at a time: of a server that has not helped lately, and at most. Each
# stream of use doubles it. What a wrong server sends is read for nothing.
FIRST_TOKENS, STREAM_TOKENS = 64, 512
# Seconds in which a stream that has begun is waited for.
SOON_S = 0.1
# Bytes of text for each token that may be written.
BYTES_A_TOKEN = 8
# Streams in a row, of all requests, that were of no use: then there is a pause, for as
# many seconds at first and at most.
MAX_USELESS = 8
USELESS_S, LONGEST_USELESS_S = 0.5, 30.0


class Found(NamedTuple):
    """What there is for a request in a round."""

    tokens: Sequence[int] = ()
    #: Whether the answer ends behind them.
    ended: bool = False
    #: Whether nothing could be had.
    is_lost: bool = False


class RemoteDrafter:
    """The server of `--speculative-parse-draft-url`. Its drafts are judged."""

    name = "remote"
    token_level = False
    max_tokens = 0
    elsewhere = True
    reads_features = False

    def __init__(
        self,
        streams: RemoteStreams | None,
        encoder: TextEncoder,
        ranks: Ranks,
        clock: Callable[[], float] = time.monotonic,
        marks: Marks | None = None,
    ) -> None:
        """streams: None on all ranks but the first. encoder, marks: of the target."""
        self.streams = streams
        self.ranks = ranks
        self.pieces = encoder.pieces
        self.writer = DraftWriter(encoder)
        self.memories: dict[RequestState, Memory] = {}
        self.marks = marks
        self._clock = clock
        #: Open where the streams of all requests are of no use.
        self._worth = Breaker(
            clock, most=MAX_USELESS, rest_s=USELESS_S, longest_s=LONGEST_USELESS_S
        )
        self._is_useless = False
        self._asked_for = FIRST_TOKENS
        #: Whether text is to be had, for all ranks alike. Where it is not, rounds are
        #: as if there were no draft server.
        self._gives = True
        self._is_told = False

    @classmethod
    def create(cls, context: DrafterContext) -> RemoteDrafter | None:
        """None where the server has no draft server."""
        config = context.config
        if not config.draft_url:
            return None
        streams = None
        if context.ranks.is_first:
            streams = RemoteStreams(
                config.draft_url,
                model=config.draft_url_model,
                key=os.environ.get(DRAFT_KEY_ENV, ""),
                most=config.draft_url_streams,
                count=TELEMETRY.add_draft_stream,
            )
        return cls(
            streams,
            TextEncoder(context.tokenizer),
            context.ranks,
            marks=marks_of(context.tokenizer),
        )

    @property
    def runners(self) -> Sequence[DraftRunner]:
        return ()

    def open(self, resources: DrafterResources) -> None:
        if self.streams is not None:
            self.streams.probe()

    def can_draft(self, r: RequestRound) -> bool:
        return (
            self._gives
            and self.name not in r.state.failed_drafters
            and r.req.input_embeds is None
        )

    def before_prefill(self, prefill: Prefill) -> None:
        """The remote server may read the prompt while the target does."""
        self._gives = True
        if self.streams is None:
            return
        fresh = {id(one.req) for one in prefill.requests}
        self._close(lambda memory: id(memory.req) in fresh or memory.req.finished())
        for one in prefill.requests:
            state = one.state
            if state is None or state.options.mode == "off" or one.req.input_embeds:
                continue
            if state.options.verify_only:
                continue
            memory = self._remember(state, one.req)
            self._catch_up(memory, one.req.output_ids, ())
            self._begin(memory)

    def after_prefill(
        self, prefill: Prefill, features: Tensor | None, next_tokens: Tensor
    ) -> None:
        return None

    def after_pass(self, round: Round) -> None:
        return None

    # -- A round -----------------------------------------------------------------

    def draft(self, round: Round) -> None:
        """Write what has come. Every rank takes what the first one read."""
        self._close(lambda memory: memory.req.finished())
        found = [self._try(r) for r in round]
        lists = self.ranks.agree_all(
            [
                [int(self._gives_text())],
                [len(one.tokens) for one in found],
                [int(one.ended) for one in found],
                [int(one.is_lost) for one in found],
            ]
        )
        (gives,), sizes, ends, lost = lists
        self._gives = bool(gives)
        written = self.ranks.agree_all(
            [
                one.tokens if self.streams is not None else [0] * num
                for one, num in zip(found, sizes, strict=True)
            ]
        )
        for r, tokens, ended, is_lost in zip(round, written, ends, lost, strict=True):
            self._extend(r, tokens, ended=bool(ended))
            tell_of(r.state, has_draft=bool(tokens), is_lost=bool(is_lost))

    def _try(self, r: RequestRound) -> Found:
        """What there is for a request. Never raises: all ranks wait for the first."""
        if self.streams is None:
            return Found()
        try:
            return self._found(r)
        except Exception:
            if not self._is_told:
                logger.exception("PARSE: drafter %s failed for a request", self.name)
            self._is_told = True
            return Found(is_lost=True)

    def _found(self, r: RequestRound) -> Found:
        assert self.streams is not None
        if not r.limit or self.name in r.state.failed_drafters:
            return Found()
        memory = self.memories.get(r.state)
        if memory is None:
            memory = self._remember(r.state, r.req)
        self._catch_up(memory, r.req.output_ids, r.state.ready)
        self._renew(memory)
        is_lost = memory.num_failed > 0 or not self.streams.is_up
        # Where a grammar cut what was pending, nothing is drafted in its place.
        held = min(len(r.state.pending), r.window)
        room, stream = r.room(self.name), memory.stream
        if stream is None or not room or len(r.draft.tokens) < held:
            return Found(is_lost=is_lost)
        known = memory.answer[memory.start :] + self.pieces.join(r.draft.tokens)
        has_ended = stream.has_ended  # before its text is read
        text = bytes(stream.text)
        if not text.startswith(known):
            return Found(is_lost=is_lost)
        rest = text[len(known) : len(known) + room * BYTES_A_TOKEN]
        whole = has_ended and len(known) + len(rest) == len(text)
        tokens = self.writer.write(rest, most=room, whole=whole)
        ended = whole and len(self.pieces.join(tokens)) == len(rest)
        return Found(tokens, ended=ended and bool(r.state.stop_ids), is_lost=is_lost)

    def _extend(self, r: RequestRound, tokens: Sequence[int], *, ended: bool) -> None:
        stops = r.state.stop_ids
        stop = next((k for k, t in enumerate(tokens) if t in stops), None)
        if stop is not None:
            tokens, ended = tokens[:stop], True
        if r.grammar is not None and tokens:
            allowed = r.grammar.walk(tokens)
            tokens, ended = tokens[:allowed], ended and allowed == len(tokens)
        if tokens or ended:
            r.draft = r.draft.extended(
                self.name, tokens, ended=ended, token_level=False
            )

    # -- Streams -------------------------------------------------------------------

    def _remember(self, state: RequestState, req: SchedulerRequest) -> Memory:
        ids = req.origin_input_ids
        prompt = self.pieces.join(ids).decode(errors="replace")
        chat = chat_of(req, Thinking(self.marks, None).state(self.pieces, ids))
        memory = self.memories[state] = Memory(req, prompt, chat)
        return memory

    def _catch_up(
        self, memory: Memory, output: Sequence[int], ready: Sequence[int]
    ) -> None:
        num = memory.num_output
        new = [*output[num:], *ready[max(0, num - len(output)) :]]
        if self.marks is not None and not set(self.marks.ids).isdisjoint(new):
            memory.chat = None  # a template drops what an answer has thought
        memory.answer += self.pieces.join(new)
        memory.num_output += len(new)

    def _renew(self, memory: Memory) -> None:
        """Let a stream go that the answer has left; begin one where there is none."""
        stream = memory.stream
        if stream is not None and has_left(memory, stream):
            self._let_go(memory)
            if stream.has_failed and not stream.text:
                memory.num_failed += 1
            elif stream.text:
                memory.num_failed = 0
            given = given_by(stream, memory)
            if was_worth_it(stream, given):
                memory.pause_s = FIRST_PAUSE_S
            else:
                memory.pause_s = min(2 * memory.pause_s, LONGEST_PAUSE_S)
            is_used_up = given == len(stream.text) and was_worth_it(stream, given)
            pause_s = 0.0 if is_used_up else memory.pause_s
            memory.not_before = self._clock() + pause_s
        if memory.stream is None and self._clock() >= memory.not_before:
            self._begin(memory)

    def _begin(self, memory: Memory) -> None:
        left = memory.req.sampling_params.max_new_tokens - memory.num_output
        if left < 2 or unfinished(bytes(memory.answer[-4:])) or not self._may_begin():
            return
        assert self.streams is not None
        memory.start, memory.begun = len(memory.answer), self._clock()
        answer = memory.answer.decode(errors="replace")
        chat = memory.chat
        memory.stream = self.streams.begin(
            memory.prompt + answer,
            min(left, self._asked_for),
            replace(chat, answer=chat.answer + answer) if chat else None,
        )
        if memory.stream is None:
            memory.not_before = self._clock() + memory.pause_s

    def _gives_text(self) -> bool:
        """Whether text has come or is about to come, on the first rank."""
        if self.streams is None or not self.streams.is_up:
            return False
        soon = self._clock() - SOON_S
        return any(one.has_unread or one.begun > soon for one in self.memories.values())

    def _may_begin(self) -> bool:
        """Where streams are of no use, one is tried at a time."""
        if self._worth.is_open:
            return False
        others = self.memories.values() if self._worth.is_failing else ()
        return all(one.stream is None for one in others)

    def _close(self, is_gone: Callable[[Memory], bool]) -> None:
        for state, memory in list(self.memories.items()):
            if is_gone(memory):
                del self.memories[state]
                self._catch_up(memory, memory.req.output_ids, ())
                self._let_go(memory)

    def _let_go(self, memory: Memory) -> None:
        """End its stream, and learn whether streams are of use."""
        stream, memory.stream = memory.stream, None
        if stream is None or self.streams is None:
            return
        self.streams.end(stream)
        useful = is_useful(stream, memory)
        if useful:
            self._worth.succeed()
            self._is_useless = False
            self._asked_for = min(2 * self._asked_for, STREAM_TOKENS)
            return
        if useful is None:
            return
        self._asked_for = FIRST_TOKENS
        if self._worth.fail() and not self._is_useless:
            self._is_useless = True
            logger.warning(
                "PARSE: %d streams of the draft server in a row were of no use; it is "
                "asked rarely until one is.",
                MAX_USELESS,
            )


def tell_of(state: RequestState, *, has_draft: bool, is_lost: bool) -> None:
    """Have the report say that no draft could be had, for as long as that is so."""
    report = state.report
    if has_draft and report.fallback == UNREACHABLE:
        report.fallback = ""
    elif is_lost and not report.fallback and "remote" not in report.drafters.drafted:
        report.fallback = UNREACHABLE
