"""Completions of a remote server, streamed beside the scheduler; no SGLang, no torch.

One thread runs all streams, so the scheduler never waits. Nothing that the server sends
is trusted: its lines and texts are bounded, and a server that fails is left alone for a
while.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

from sglang_parse.remote.breaker import Breaker
from sglang_parse.remote.remote_protocol import (
    CONNECT_S,
    EndlessError,
    RefusedError,
    RemoteError,
    check_reply,
    described,
    headers_with,
    lines_of,
    read_event,
    read_models,
)

logger = logging.getLogger(__name__)

# Seconds: to the first text, and from one text to the next.
FIRST_TEXT_S = 30.0
NEXT_TEXT_S = 30.0
# Bytes of text that a stream may be ahead.
MAX_TEXT = 16_384


@dataclass(eq=False)
class Stream:
    """One completion so far. The thread writes, others read."""

    prompt: str
    max_tokens: int
    #: UTF-8 that has arrived so far.
    text: bytearray = field(default_factory=bytearray)
    #: Whether nothing more comes, and whether the answer ends there.
    is_done: bool = False
    has_ended: bool = False
    #: Whether it broke, and whether the server refuses this text.
    has_failed: bool = False
    is_refused: bool = False
    _task: Any = None


class RemoteStreams:
    """Streams of one OpenAI-compatible server."""

    def __init__(
        self,
        url: str,
        *,
        model: str = "",
        key: str = "",
        most: int = 32,
        breaker: Breaker | None = None,
        count: Callable[[str], None] = lambda event: None,
    ) -> None:
        """url: with its version, such as http://host:30000/v1. model: "" for the first
        that it lists. key: sent as bearer token, "" for none. most: streams at a time.
        count: told `begun` and `failed` of each stream, and when the server is
        `left_alone`.
        """
        self.url = url.rstrip("/")
        self.most = most
        self.breaker = breaker or Breaker()
        self._count = count
        self._model = model
        self._open: set[Stream] = set()
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(NEXT_TEXT_S, connect=CONNECT_S),
            headers=headers_with(key),
            limits=httpx.Limits(max_connections=most + 1),
        )
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run_loop, name="parse-remote-draft", daemon=True
        )
        self._thread.start()

    # -- From the scheduler's thread --------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether the server may be sent requests."""
        return not self.breaker.is_open

    def begin(self, prompt: str, max_tokens: int) -> Stream | None:
        """Have the server continue a text; None where too many streams are open, or the
        server is left alone."""
        most = 1 if self.breaker.is_failing else self.most
        if not self.is_up or len(self._open) >= most:
            return None
        stream = Stream(prompt, max_tokens)
        self._open.add(stream)
        self._count("begun")
        self._loop.call_soon_threadsafe(self._start, stream)
        return stream

    def end(self, stream: Stream) -> None:
        """The rest of it is not needed."""
        if not stream.is_done:
            self._loop.call_soon_threadsafe(self._cancel, stream)

    def look_up(self) -> None:
        """Fetch the list of models, and warn where the server cannot be reached."""
        asyncio.run_coroutine_threadsafe(self._try_look_up(), self._loop)

    def close(self) -> None:
        """End all streams and the thread."""
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    # -- In the thread of the streams -------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        # It writes a line for every request otherwise.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._loop.run_forever()

    def _start(self, stream: Stream) -> None:
        stream._task = self._loop.create_task(self._follow(stream))
        stream._task.add_done_callback(lambda _: self._finish(stream))

    def _finish(self, stream: Stream) -> None:
        stream.is_done = True
        self._open.discard(stream)

    def _cancel(self, stream: Stream) -> None:
        if stream._task is not None:
            stream._task.cancel()

    async def _follow(self, stream: Stream) -> None:
        try:
            await self._read(stream)
            self.breaker.succeed()
        except asyncio.CancelledError:
            pass  # the rest is not needed
        except RefusedError:
            # Says nothing of the server: a client may have sent what it refuses.
            stream.has_failed = stream.is_refused = True
            self._count("failed")
        except EndlessError as error:
            stream.has_failed = not stream.text
            if stream.has_failed:
                self._note(error)
        except Exception as error:
            stream.has_failed = True
            self._note(error)

    async def _read(self, stream: Stream) -> None:
        async with asyncio.timeout(FIRST_TEXT_S) as limit:
            if not self._model:
                await self._look_up()
            body = {
                "model": self._model,
                "prompt": stream.prompt,
                "max_tokens": stream.max_tokens,
                "temperature": 0,
                "stream": True,
            }
            url = f"{self.url}/completions"
            async with self._client.stream("POST", url, json=body) as reply:
                check_reply(reply)
                async for line in lines_of(reply, stream.max_tokens):
                    text, reason, is_last = read_event(line)
                    if text:
                        limit.reschedule(self._loop.time() + NEXT_TEXT_S)
                        self.breaker.succeed()
                    room = MAX_TEXT - len(stream.text)
                    stream.text += text[:room]
                    if len(text) > room:
                        return  # far enough ahead
                    if reason:
                        stream.has_ended = reason == "stop"
                        return
                    if is_last:
                        return
        raise RemoteError("the stream broke off")

    async def _look_up(self) -> None:
        """Ask for the list of models, and take the first where none is named."""
        async with self._client.stream("GET", f"{self.url}/models") as reply:
            if not self._model:
                self._model = (await read_models(reply))[0]

    async def _try_look_up(self) -> None:
        try:
            async with asyncio.timeout(FIRST_TEXT_S):
                await self._look_up()
        except Exception as error:
            logger.warning(
                "PARSE: the draft server at %s cannot be used now (%s); the target "
                "goes on without it.",
                self.url,
                described(error),
            )

    async def _shut(self) -> None:
        tasks = [s._task for s in self._open if s._task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._client.aclose()

    def _note(self, error: Exception) -> None:
        self._count("failed")
        if self.breaker.fail():
            self._count("left_alone")
            logger.warning(
                "PARSE: the draft server at %s fails (%s) and is left alone for a "
                "while; the target goes on without it.",
                self.url,
                described(error),
            )
