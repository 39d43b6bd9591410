"""One request beside its stream: what the stream gave, and when the next one begins."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sglang_parse.drafting.transcript import common_length
from sglang_parse.remote.remote_streams import Stream
from sglang_parse.sgl.scheduler_types import SchedulerRequest

# Bytes that the answer may be ahead of its stream before another is begun.
MAX_BEHIND = 64
# Correct bytes that make a stream worth its prompt: a quarter of what was read, within
# these bounds. Answers of one kind often begin alike by chance.
ENOUGH, PLENTY = 16, 64
# Bytes from which on it counts that a stream was read for nothing.
COSTLY = 128
# Seconds between two streams of a request: at first, and where streams give nothing.
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.05, 5.0


@dataclass
class StreamedAnswer:
    """What the first rank knows of one request."""

    req: SchedulerRequest
    #: The prompt as text.
    prompt: str
    #: Bytes of the answer so far, and output tokens that are in them.
    text: bytearray = field(default_factory=bytearray)
    num_output: int = 0
    stream: Stream | None = None
    #: Bytes of the answer before the stream's text, and when the stream began.
    start: int = 0
    begun: float = -math.inf
    #: When the next stream may begin, and the pause after it.
    not_before: float = 0.0
    pause_s: float = FIRST_PAUSE_S
    #: Whether its last stream broke without a text.
    has_failed: bool = False

    @property
    def written(self) -> bytearray:
        """The answer from where its stream began."""
        return self.text[self.start :]

    @property
    def has_unread(self) -> bool:
        """Whether the stream is ahead of the answer."""
        stream = self.stream
        return stream is not None and len(stream.text) > len(self.written)

    def has_left(self, stream: Stream) -> bool:
        """Whether the answer gets nothing more of its stream."""
        is_done, has_ended = stream.is_done, stream.has_ended
        text, answer = stream.text, self.written
        if not (text.startswith(answer) or answer.startswith(text)):
            return True
        behind = len(answer) - len(text)
        if is_done:
            return behind > 0 or (behind == 0 and not has_ended)
        return bool(text) and behind > MAX_BEHIND

    def settle(self, stream: Stream, now: float) -> None:
        """A stream has ended: when the next one may begin."""
        self.has_failed = stream.has_failed and not stream.text
        if stream.is_refused:
            # Another text of the same request would be refused as well.
            self.not_before = math.inf
            return
        given = self._given_by(stream)
        if was_worth_it(stream, given):
            self.pause_s = FIRST_PAUSE_S
        else:
            self.pause_s = min(2 * self.pause_s, LONGEST_PAUSE_S)
        is_used_up = given == len(stream.text) and was_worth_it(stream, given)
        self.not_before = now + (0.0 if is_used_up else self.pause_s)

    def is_useful(self, stream: Stream) -> bool | None:
        """Whether a stream that ends was worth reading; None where it cost little: it
        broke, it came too late, or it was short."""
        given = self._given_by(stream)
        if was_worth_it(stream, given):
            return True
        if stream.has_failed and not stream.text:
            return None
        is_wrong = given < min(len(stream.text), len(self.written))
        return False if is_wrong and len(stream.text) >= COSTLY else None

    def _given_by(self, stream: Stream) -> int:
        """Bytes of the answer that a stream had right."""
        return common_length(stream.text, self.written)


def was_worth_it(stream: Stream, given: int) -> bool:
    """Whether this many correct bytes were worth reading the stream."""
    return given >= min(PLENTY, max(ENOUGH, len(stream.text) // 4))
