"""What the remote drafter knows of a request, and what its streams were good for."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sglang_parse.drafting.draft_prompt import CHAT_KEY, carried
from sglang_parse.drafting.remote_protocol import Chat
from sglang_parse.drafting.remote_streams import Stream
from sglang_parse.drafting.transcript import common_length
from sglang_parse.runtime.protocols import SchedulerRequest

# Bytes that the answer may be ahead of its stream before another is begun.
MAX_BEHIND = 64
# Bytes of a stream's text that make it worth its prompt: a quarter of what was read, at
# least and at most so many. Answers of one kind often begin alike, by chance. And so
# many bytes that reading them for nothing counts.
ENOUGH, PLENTY, COSTLY = 16, 64, 128
# Seconds between two streams of a request: at first, and where streams give nothing.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0


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
    #: Bytes of the answer before the stream's text, and when the stream began.
    start: int = 0
    begun: float = -math.inf
    #: When the next stream may begin, and the pause behind it.
    not_before: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    #: Streams in a row that broke without a text.
    num_failed: int = 0

    @property
    def has_unread(self) -> bool:
        """Whether its stream is ahead of the answer."""
        if self.stream is None:
            return False
        return len(self.stream.text) > len(self.answer) - self.start


def has_left(memory: Memory, stream: Stream) -> bool:
    """Whether an answer gets nothing more of its stream."""
    is_done, has_ended = stream.is_done, stream.has_ended
    text, answer = stream.text, memory.answer[memory.start :]
    if not (text.startswith(answer) or answer.startswith(text)):
        return True
    if is_done:
        return len(answer) > len(text) or (len(answer) == len(text) and not has_ended)
    return bool(text) and len(answer) > len(text) + MAX_BEHIND


def given_by(stream: Stream, memory: Memory) -> int:
    """Bytes of the answer that a stream had right."""
    return common_length(stream.text, memory.answer[memory.start :])


def was_worth_it(stream: Stream, given: int) -> bool:
    """Whether so many right bytes were worth reading the stream."""
    return given >= min(PLENTY, max(ENOUGH, len(stream.text) // 4))


def is_useful(stream: Stream, memory: Memory) -> bool | None:
    """Whether a stream that ends was worth reading; None where that cost little: it
    broke, it came too late, or it was short."""
    given = given_by(stream, memory)
    if was_worth_it(stream, given):
        return True
    if stream.has_failed and not stream.text:
        return None
    is_wrong = given < min(len(stream.text), len(memory.answer) - memory.start)
    return False if is_wrong and len(stream.text) >= COSTLY else None


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
