"""A draft from a remote server: text that it streams, as the target's tokens.

Each request has a stream that goes on from its text. A round takes what has come and
never waits. Where the answer leaves the streamed text, a new stream begins there.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from sglang_parse.drafting.base import DrafterContext, DrafterResources, Prefill
from sglang_parse.drafting.draft_prompt import CHAT_KEY, carried
from sglang_parse.drafting.remote_protocol import Chat
from sglang_parse.drafting.remote_streams import RemoteStreams, Stream
from sglang_parse.drafting.runner import DraftRunner
from sglang_parse.drafting.text_bridge import (
    DraftWriter,
    TextEncoder,
    unfinished,
)
from sglang_parse.drafting.thinking import Marks, Thinking, marks_of
from sglang_parse.drafting.transcript import common_length
from sglang_parse.options.server import DRAFT_KEY_ENV
from sglang_parse.reporting.telemetry import TELEMETRY
from sglang_parse.requests.round import RequestRound, Round
from sglang_parse.requests.state import RequestState
from sglang_parse.runtime.protocols import SchedulerRequest
from sglang_parse.runtime.ranks import Ranks

logger = logging.getLogger(__name__)

UNREACHABLE = "draft_unreachable"
# Tokens asked for at a time.
STREAM_TOKENS = 512
# Bytes that the answer may be ahead of its stream before another is begun.
MAX_BEHIND = 64
# Bytes of a stream's text that make it worth its prompt.
ENOUGH = 16
# Seconds between two streams of a request: at first, and where streams give nothing.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0
# Bytes of text for each token that may be written.
BYTES_A_TOKEN = 8


@dataclass
class Memory:
    """What is known of one request, on the first rank."""

    req: SchedulerRequest
    #: The prompt as text.
    prompt: str
    #: The same as a chat; None where it is none, or thinks.
    chat: Chat | None = None
    #: Bytes of the answer so far, and output tokens that are in them.
    answer: bytearray = field(default_factory=bytearray)
    num_output: int = 0
    stream: Stream | None = None
    #: Bytes of the answer before the stream's text.
    start: int = 0
    #: When the next stream may begin, and the pause behind it.
    not_before: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    #: Streams in a row that broke without a text.
    num_failed: int = 0


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
        self._is_up = True
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
            self._is_up
            and self.name not in r.state.failed_drafters
            and r.req.input_embeds is None
        )

    def before_prefill(self, prefill: Prefill) -> None:
        """The remote server may read the prompt while the target does."""
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
                [int(self.streams is not None and self.streams.is_up)],
                [len(one.tokens) for one in found],
                [int(one.ended) for one in found],
                [int(one.is_lost) for one in found],
            ]
        )
        (is_up,), sizes, ends, lost = lists
        self._is_up = bool(is_up)
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
            assert self.streams is not None
            self.streams.end(stream)
            memory.stream = None
            if stream.has_failed and not stream.text:
                memory.num_failed += 1
            elif stream.text:
                memory.num_failed = 0
            given = common_length(stream.text, memory.answer[memory.start :])
            if given >= ENOUGH:
                memory.pause_s = FIRST_PAUSE_S
            else:
                memory.pause_s = min(2 * memory.pause_s, LONGEST_PAUSE_S)
            is_used_up = given >= ENOUGH and given == len(stream.text)
            pause_s = 0.0 if is_used_up else memory.pause_s
            memory.not_before = self._clock() + pause_s
        if memory.stream is None and self._clock() >= memory.not_before:
            self._begin(memory)

    def _begin(self, memory: Memory) -> None:
        left = memory.req.sampling_params.max_new_tokens - memory.num_output
        if left < 2 or unfinished(bytes(memory.answer[-4:])):
            return
        assert self.streams is not None
        memory.start = len(memory.answer)
        answer = memory.answer.decode(errors="replace")
        chat = memory.chat
        memory.stream = self.streams.begin(
            memory.prompt + answer,
            min(left, STREAM_TOKENS),
            replace(chat, answer=chat.answer + answer) if chat else None,
        )
        if memory.stream is None:
            memory.not_before = self._clock() + memory.pause_s

    def _close(self, is_gone: Callable[[Memory], bool]) -> None:
        for state, memory in list(self.memories.items()):
            if is_gone(memory):
                del self.memories[state]
                if memory.stream is not None and self.streams is not None:
                    self.streams.end(memory.stream)


def has_left(memory: Memory, stream: Stream) -> bool:
    """Whether an answer gets nothing more of its stream."""
    is_done, has_ended = stream.is_done, stream.has_ended
    text, answer = stream.text, memory.answer[memory.start :]
    if not (text.startswith(answer) or answer.startswith(text)):
        return True
    if is_done:
        return len(answer) > len(text) or (len(answer) == len(text) and not has_ended)
    return bool(text) and len(answer) > len(text) + MAX_BEHIND


def chat_of(req: SchedulerRequest, thinking: str) -> Chat | None:
    """The chat that came with a request; None where there is none that another server
    can go on from: it thinks already, or has tools. thinking: `Thinking.state`."""
    found = carried(req, CHAT_KEY, dict)
    if found is None or thinking == "open" or found.get("tools"):
        return None
    messages, options = found.get("messages"), found.get("options")
    if not isinstance(messages, list) or not isinstance(options, dict):
        return None
    if thinking == "closed":
        options = {"enable_thinking": False, "thinking": False} | options
    last = messages[-1] if messages else None
    if not isinstance(last, dict) or not found.get("is_continued"):
        return Chat(messages, options=options) if messages else None
    begun = last.get("content")
    if not isinstance(begun, str):
        return None
    return Chat(messages[:-1], begun, options)


def tell_of(state: RequestState, *, has_draft: bool, is_lost: bool) -> None:
    """Have the report say that no draft could be had, for as long as that is so."""
    report = state.report
    if has_draft and report.fallback == UNREACHABLE:
        report.fallback = ""
    elif is_lost and not report.fallback and "remote" not in report.drafters.drafted:
        report.fallback = UNREACHABLE
