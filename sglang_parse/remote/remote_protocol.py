"""Requests to an OpenAI-compatible server, and its replies.

Nothing that it sends is trusted: lines and lists are bounded, and no error quotes them.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator

import httpx

from sglang_parse.options.validation import DRAFT_KEY_ENV

# Seconds to connect.
CONNECT_S = 5.0
# Bytes of one line of a reply, and of a list of models.
MAX_LINE = 65_536
# What a reply may have for each requested token and besides: lines and reads, then
# bytes. Reading costs the scheduler's own core.
PIECES_A_TOKEN, MORE_PIECES = 8, 256
BYTES_A_TOKEN, MORE_BYTES = 2_048, 65_536
# Characters of a model's name.
MAX_NAME = 200
# HTTP statuses that refuse this text alone; a client may have caused them.
REFUSED = (400, 413, 422)


class RemoteError(Exception):
    """A reply that is no stream of text. The message holds nothing of the reply."""


class RefusedError(RemoteError):
    """The server refuses this request; it may serve others."""


class EndlessError(RemoteError):
    """A reply that goes on without the requested tokens."""


def check_key(key: str) -> None:
    """Raises ValueError, which does not show the key, where no HTTP header holds it."""
    if not all("!" <= c <= "~" for c in key):
        raise ValueError(
            f"{DRAFT_KEY_ENV} has a character that no API key has; expected printable "
            "ASCII without spaces and line breaks."
        )


def headers_with(key: str) -> dict[str, str]:
    """Of every request. A compressed reply would grow beyond our bounds."""
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
    if reply.status_code in REFUSED:
        raise RefusedError(f"HTTP {reply.status_code}")
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
        models = [str(one["id"])[:MAX_NAME] for one in json.loads(bytes(body))["data"]]
    except (ValueError, LookupError, TypeError, RecursionError) as e:
        raise RemoteError("the list of models cannot be read") from e
    if not models:
        raise RemoteError("the list of models is empty")
    return models


async def lines_of(reply: httpx.Response, max_tokens: int) -> AsyncIterator[bytes]:
    """Lines of a reply. max_tokens: as requested.

    Raises RemoteError on a line that is too long, EndlessError on too much of a reply.
    """
    pieces = MORE_PIECES + PIECES_A_TOKEN * max_tokens
    room = MORE_BYTES + BYTES_A_TOKEN * max_tokens
    held = bytearray()
    async for chunk in reply.aiter_raw():
        held += chunk
        *lines, rest = held.split(b"\n")
        held = bytearray(rest)
        pieces -= 1
        room -= len(chunk)
        for line in lines:
            pieces -= 1
            if len(line) > MAX_LINE:
                raise RemoteError("a line of the stream is too long")
            if pieces < 0:
                break
            yield bytes(line)
        if len(held) > MAX_LINE:
            raise RemoteError("a line of the stream is too long")
        if pieces < 0 or room < 0:
            raise EndlessError("the stream goes on without text")


def read_event(line: bytes) -> tuple[bytes, str, bool]:
    """New text of one line of a stream, the reason why the answer ends there or "", and
    whether no line follows. Raises RemoteError on what is no event of a completion."""
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
