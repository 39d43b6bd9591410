"""HTTP responses that are always complete, and JSON where they tell of an error.

SGLang's handlers break a stream off if they raise after its first byte, and answer an
unexpected error with plain text. `RequestShield` passes each response through
`HeldAnswer`, which can still turn it into an error.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import orjson
from starlette.types import Message, Send

from sglang_parse.shield.faults import MAX_MESSAGE

# Before the scheduler has a request, these statuses mean that the request is at fault.
FAILED = (500, 501)
TYPES = {400: "BadRequestError", 503: "ServiceUnavailableError"}


@dataclass
class Progress:
    """How far one request has come."""

    #: Whether a part of it is ready for the scheduler.
    is_ready: bool = False


class HeldAnswer:
    """Passes a response on, and holds back what an error may still change.

    The start is sent with the first byte of the body. HTTP 500 and 501 become 400 if
    the scheduler does not have the request yet.
    """

    def __init__(self, progress: Progress, send: Send) -> None:
        self.progress = progress
        self.send = send
        self.start: Message | None = None
        #: Whether a byte has reached the client, and whether the last one has.
        self.has_started = False
        self.has_ended = False
        self._is_refused = False
        self._held = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.start = message
            fails = message["status"] in FAILED
            self._is_refused = fails and not self.progress.is_ready
            return
        is_last = not message.get("more_body", False)
        if self._is_refused:
            self._held += message.get("body", b"")
            if is_last:
                self.has_started = self.has_ended = True
                await refuse(self.send, _message_in(self._held))
            return
        if not self.has_started:
            if not message.get("body") and not is_last:
                return
            self.has_started = True
            assert self.start is not None, "a response has a start"
            await self.send(self.start)
        self.has_ended = is_last
        await self.send(message)

    async def fail(self, status: int, told: str) -> None:
        """End the response with an error, which is its status where none was sent."""
        if self.has_ended:
            return
        if not self.has_started:
            self.has_started = self.has_ended = True
            await refuse(self.send, told, status)
            return
        self.has_ended = True
        body = _event_of(self._kind(), status, told)
        await self.send({"type": "http.response.body", "body": body})

    def _kind(self) -> bytes:
        """The content type of the response that has started."""
        headers = self.start["headers"] if self.start else ()
        return next((v for k, v in headers if k.lower() == b"content-type"), b"")


def _event_of(kind: bytes, status: int, told: str) -> bytes:
    """An error as the last event of a stream."""
    if kind.startswith(b"text/event-stream"):
        return b"data: " + orjson.dumps({"error": _error(told, status)}) + b"\n\n"
    if kind.startswith(b"application/x-ndjson"):  # Ollama's
        return orjson.dumps({"error": told}) + b"\n"
    return b""


def _message_in(body: bytes) -> str:
    """What an error response says."""
    try:
        value = orjson.loads(body)
        told = value.get("message") or value["error"]["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        told = body.decode("utf-8", "replace")
    return f"The request cannot be read ({str(told)[:300]})."


def status_of(error: BaseException) -> tuple[int, str]:
    """The HTTP status and the sentence of an error after the scheduler."""
    seen: BaseException | None = error
    while seen is not None:
        status = getattr(seen, "status_code", None)
        if isinstance(status, int) and 400 <= status < 600:
            detail = getattr(seen, "detail", "") or str(seen)
            return status, str(detail)[:MAX_MESSAGE]
        if isinstance(seen, ValueError):
            return 400, str(seen)[:MAX_MESSAGE]
        # Starlette raises its own error if SGLang's HTTPException comes too late.
        seen = seen.__cause__
    return 500, f"The server failed on this request ({type(error).__name__})."


def _error(message: str, status: int) -> dict[str, Any]:
    kind = TYPES.get(status, "InternalServerError" if status >= 500 else "Error")
    told = {"object": "error", "message": message, "type": kind}
    return {**told, "param": None, "code": status}


async def refuse(send: Send, message: str, status: int = 400) -> None:
    """A complete response in the shape of SGLang's OpenAI errors."""
    body = orjson.dumps(_error(message, status))
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
    ]
    start = {"type": "http.response.start", "status": status, "headers": headers}
    await send(start)
    await send({"type": "http.response.body", "body": body})
