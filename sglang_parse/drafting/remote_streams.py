"""Completions of a remote server, streamed beside the scheduler; no SGLang, no torch.

A thread of its own runs all streams. Whoever wants a draft takes what is there and
never waits. Nothing that the server sends is trusted: its lines and texts are bounded,
and a server that fails is left alone for a while.
"""

from __future__ import annotations

import asyncio
import json
import logging
import threading
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

import httpx

logger = logging.getLogger(__name__)

# Seconds: to connect, to the first text, and from one text to the next.
CONNECT_S = 5.0
FIRST_TEXT_S = 30.0
NEXT_TEXT_S = 30.0
# Bytes of text that a stream may be ahead, and of one line of its reply.
MAX_TEXT = 16_384
MAX_LINE = 65_536
# Characters of a model's name.
MAX_NAME = 200
# Failures in a row after which the server is left alone, and for how many seconds: as
# a rule, and at most.
MAX_FAILURES = 3
REST_S, MAX_REST_S = 10.0, 300.0


class RemoteError(Exception):
    """A reply that is no stream of text. The message holds nothing of the reply."""


class Breaker:
    """Leaves a server alone that fails several times in a row."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._failures = 0
        self._rest_s = REST_S
        self._until = 0.0

    @property
    def is_open(self) -> bool:
        """Whether the server is left alone now. Behind the rest, one more is tried."""
        return self.is_failing and self._clock() < self._until

    @property
    def is_failing(self) -> bool:
        """Whether the last streams failed: one at a time is enough then."""
        return self._failures >= MAX_FAILURES

    def succeed(self) -> None:
        self._failures, self._rest_s = 0, REST_S

    def fail(self) -> bool:
        """Count a failure; whether the server is left alone from now on."""
        self._failures += 1
        if not self.is_failing or self.is_open:
            return False
        self._until = self._clock() + self._rest_s
        self._rest_s = min(2 * self._rest_s, MAX_REST_S)
        return True


@dataclass(eq=False)
class Stream:
    """One completion, as far as it has come. The thread writes, others read."""

    prompt: str
    max_tokens: int
    #: UTF-8 that has come so far.
    text: bytearray = field(default_factory=bytearray)
    #: Whether nothing more comes, and whether the answer ends there.
    is_done: bool = False
    has_ended: bool = False
    #: Whether it broke.
    has_failed: bool = False
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
        self._key = key
        self._open: set[Stream] = set()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(
            target=self._run_loop, name="parse-remote-draft", daemon=True
        )
        self._thread.start()

    # -- From the scheduler's thread --------------------------------------------

    @property
    def is_up(self) -> bool:
        """Whether the server may be asked."""
        return not self.breaker.is_open

    def begin(self, prompt: str, max_tokens: int) -> Stream | None:
        """Have the server go on from a text; None where too many streams are open, or
        the server is left alone."""
        most = 1 if self.breaker.is_failing else self.most
        if not self.is_up or len(self._open) >= most:
            return None
        stream = Stream(prompt, max_tokens)
        self._open.add(stream)
        self._count("begun")
        self._loop.call_soon_threadsafe(self._start, stream)
        return stream

    def end(self, stream: Stream) -> None:
        """Nobody wants the rest of it."""
        if not stream.is_done:
            self._loop.call_soon_threadsafe(self._cancel, stream)

    def probe(self) -> None:
        """Ask for the list of models, and warn where the server cannot be reached."""
        asyncio.run_coroutine_threadsafe(self._probe(), self._loop)

    def close(self) -> None:
        """End all streams and the thread."""
        asyncio.run_coroutine_threadsafe(self._shut(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)

    # -- In the thread of the streams -------------------------------------------

    def _run_loop(self) -> None:
        asyncio.set_event_loop(self._loop)
        # A line for every request otherwise.
        logging.getLogger("httpx").setLevel(logging.WARNING)
        self._client = httpx.AsyncClient(
            timeout=httpx.Timeout(NEXT_TEXT_S, connect=CONNECT_S),
            headers=headers_with(self._key),
            limits=httpx.Limits(max_connections=self.most + 1),
        )
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
            pass  # nobody wants the rest
        except Exception as error:
            stream.has_failed = True
            self._note(error)

    async def _read(self, stream: Stream) -> None:
        async with asyncio.timeout(FIRST_TEXT_S) as limit:
            body = {
                "model": self._model or await self._first_model(),
                "prompt": stream.prompt,
                "max_tokens": stream.max_tokens,
                "temperature": 0,
                "stream": True,
            }
            url = f"{self.url}/completions"
            async with self._client.stream("POST", url, json=body) as reply:
                check_reply(reply)
                async for line in lines_of(reply):
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

    async def _first_model(self) -> str:
        async with self._client.stream("GET", f"{self.url}/models") as reply:
            self._model = (await read_models(reply))[0]
        return self._model

    async def _probe(self) -> None:
        try:
            async with asyncio.timeout(FIRST_TEXT_S):
                await self._first_model() if not self._model else None
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


def headers_with(key: str) -> dict[str, str]:
    """Of every request. A compressed reply would grow behind our bounds."""
    headers = {"accept-encoding": "identity"}
    return headers | ({"authorization": f"Bearer {key}"} if key else {})


def described(error: Exception) -> str:
    """An error in a few words, without anything that the server sent."""
    if isinstance(error, RemoteError):
        return str(error)
    if isinstance(error, TimeoutError):
        return "no text in time"
    return type(error).__name__


def check_reply(reply: httpx.Response) -> None:
    """Raises RemoteError on what is no plain success."""
    if reply.status_code != 200:
        raise RemoteError(f"HTTP {reply.status_code}")
    if reply.headers.get("content-encoding", "identity") != "identity":
        raise RemoteError("the reply is compressed")


async def read_models(reply: httpx.Response) -> list[str]:
    """Names of the models that a server lists, one at least. Raises RemoteError."""
    check_reply(reply)
    body = bytearray()
    async for chunk in reply.aiter_raw():
        body += chunk
        if len(body) > MAX_LINE:
            raise RemoteError("the list of models is too long")
    try:
        names = [str(one["id"])[:MAX_NAME] for one in json.loads(bytes(body))["data"]]
    except (ValueError, LookupError, TypeError, RecursionError) as e:
        raise RemoteError("the list of models cannot be read") from e
    if not names:
        raise RemoteError("the list of models is empty")
    return names


def list_models(url: str, key: str = "") -> list[str]:
    """Names of a server's models. Raises RemoteError, or what httpx raises."""

    async def ask() -> list[str]:
        async with (
            asyncio.timeout(2 * CONNECT_S),
            httpx.AsyncClient(timeout=CONNECT_S, headers=headers_with(key)) as client,
            client.stream("GET", url.rstrip("/") + "/models") as reply,
        ):
            return await read_models(reply)

    return asyncio.run(ask())


async def lines_of(reply: httpx.Response) -> AsyncIterator[bytes]:
    """Lines of a reply. Raises RemoteError on one that is too long."""
    held = bytearray()
    async for chunk in reply.aiter_raw():
        held += chunk
        *lines, rest = held.split(b"\n")
        held = bytearray(rest)
        for line in lines:
            if len(line) > MAX_LINE:
                raise RemoteError("a line of the stream is too long")
            yield bytes(line)
        if len(held) > MAX_LINE:
            raise RemoteError("a line of the stream is too long")


def read_event(line: bytes) -> tuple[bytes, str, bool]:
    """New text of one line of a stream, why the answer ends there or "", and whether
    no line follows. Raises RemoteError on what is no event of a completion."""
    if not line.startswith(b"data:"):
        return b"", "", False  # an empty line, a comment or another field
    data = line[5:].strip()
    if data == b"[DONE]":
        return b"", "", True
    try:
        choices = json.loads(data)["choices"]
        if not choices:
            return b"", "", False
        text = choices[0].get("text") or ""
        reason = choices[0].get("finish_reason") or ""
        return text.encode(errors="replace"), str(reason), False
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as e:
        raise RemoteError("an event of the stream cannot be read") from e
