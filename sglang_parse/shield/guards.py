"""Where requests meet the checks: the functions of the seams in `seams.py`.

What SGLang raises before the scheduler has a part of the request is the request's own
fault, and is answered with HTTP 400.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from fastapi import HTTPException
from starlette.types import Message, Receive, Scope, Send

from sglang_parse.shield.faults import (
    GRAMMAR_FAILED,
    NO_TOKEN_ALLOWED,
    OWN_TEMPLATE,
    drop_unknown_stops,
    holds_template,
    problem_of,
    problem_of_input,
    problem_of_update,
    sentence_of,
)
from sglang_parse.shield.held_answer import HeldAnswer, Progress, refuse, status_of
from sglang_parse.shield.seams import is_shielded

logger = logging.getLogger(__name__)

# Endpoints that only read the request until the scheduler has it.
PATHS = frozenset(
    {
        *("/generate", "/encode", "/classify", "/vertex_generate", "/invocations"),
        *("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages"),
        *("/v1/messages/count_tokens", "/v1/embeddings", "/v1/classify", "/v1/score"),
        *("/v1/rerank", "/v1/tokenize", "/v1/detokenize", "/v1/decisions"),
        *("/tokenize", "/detokenize", "/api/chat", "/api/generate", "/api/show"),
        *("/parse_function_call", "/separate_reasoning"),
    }
)
UPDATE = "/update_weights_from_disk"
# Endpoints that render a chat, and do not ask `--trust-request-chat-template`.
RENDERING = frozenset({"/v1/responses", "/v1/decisions", "/v1/systemone"})

_progress: contextvars.ContextVar[Progress | None] = contextvars.ContextVar(
    "sglang_parse_progress", default=None
)


def check_ready(
    original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook on TokenizerManager._create_tokenized_object. Raises ValueError."""
    if not is_shielded(manager.server_args):
        return original(manager, *args, **kwargs)
    try:
        tokenized = original(manager, *args, **kwargs)
    except ValueError:
        raise
    except Exception as e:
        raise ValueError(sentence_of(e)) from e
    if hasattr(tokenized, "return_logprob"):  # and no embedding request
        vocab_size = manager.model_config.vocab_size
        if told := problem_of(tokenized, vocab_size):
            raise ValueError(told)
        drop_unknown_stops(tokenized.sampling_params, vocab_size)
    if progress := _progress.get():
        progress.is_ready = True
    return tokenized


class Guarded:
    """The outputs of a request. An error before the first one is a ValueError."""

    def __init__(self, outputs: AsyncIterator[Any], told: str = "") -> None:
        """told: why the request is refused, as one sentence; "" if it is not."""
        self.outputs = outputs
        self.told = told
        self.progress = Progress()

    def __aiter__(self) -> Guarded:
        return self

    async def __anext__(self) -> Any:
        if self.told:
            raise ValueError(self.told)
        progress = _progress.get() or self.progress
        _progress.set(progress)
        try:
            return blame_grammar(await self.outputs.__anext__())
        except (ValueError, StopAsyncIteration):
            raise
        except Exception as e:
            detail = e.detail if isinstance(e, HTTPException) else ""
            if str(detail).startswith(GRAMMAR_FAILED):
                raise ValueError(NO_TOKEN_ALLOWED) from e
            if progress.is_ready:
                raise
            raise ValueError(sentence_of(e)) from e

    async def aclose(self) -> None:
        await self.outputs.aclose()  # type: ignore[attr-defined]


def blame_grammar(output: Any) -> Any:
    """HTTP 400 instead of 500 in a stream that ends because its grammar allows no
    token."""
    is_one = isinstance(output, dict)
    reason = output.get("meta_info", {}).get("finish_reason") if is_one else None
    if reason and str(reason.get("message") or "").startswith(GRAMMAR_FAILED):
        reason |= {"message": NO_TOKEN_ALLOWED, "status_code": 400}
    return output


def guard_outputs(
    result: AsyncIterator[Any], manager: Any, obj: Any, *_: Any, **__: Any
) -> Any:
    """AFTER hook on TokenizerManager.generate_request."""
    if not is_shielded(manager.server_args):
        return result
    return Guarded(result, problem_of_input(obj, manager.server_args))


class RequestShield:
    """ASGI middleware: HTTP 500 before the scheduler has the request becomes HTTP 400,
    and no response breaks off."""

    def __init__(
        self, app: Any, model_path: str = "", *, trusts_templates: bool = False
    ) -> None:
        self.app = app
        self.model_path = model_path
        self.trusts_templates = trusts_templates

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] == "http" and path == UPDATE:
            body = await read_body(receive)
            # It reads files, and others are not to wait for a disk.
            told = await asyncio.to_thread(problem_of_update, body, self.model_path)
            if told:
                await refuse(send, told)
                return
            receive = replay(body, receive)
        if scope["type"] == "http" and path in RENDERING and not self.trusts_templates:
            body = await read_body(receive)
            if holds_template(body):
                await refuse(send, OWN_TEMPLATE)
                return
            receive = replay(body, receive)
        if scope["type"] != "http" or path not in PATHS:
            await self.app(scope, receive, send)
            return
        progress = Progress()
        answer = HeldAnswer(progress, send)
        token = _progress.set(progress)
        try:
            await self.app(scope, receive, answer)
        except Exception as e:
            if not answer.has_started and not progress.is_ready:
                logger.warning("refused a request of %s", path, exc_info=True)
                await refuse(send, sentence_of(e))
                return
            status, told = status_of(e)
            await answer.fail(status, told)
            if status == 500:
                raise  # for the log
        finally:
            _progress.reset(token)


async def read_body(receive: Receive) -> bytes:
    """The whole body of a request, as much of it as comes."""
    parts: list[bytes] = []
    more = True
    while more:
        message = await receive()
        parts.append(message.get("body", b""))
        more = message.get("more_body", False)
    return b"".join(parts)


def replay(body: bytes, receive: Receive) -> Receive:
    """The body once, then what the client does next (a disconnect)."""
    messages = iter([{"type": "http.request", "body": body, "more_body": False}])

    async def replayed() -> Message:
        return next(messages, None) or await receive()

    return replayed


def add_shield(server_args: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook on http_server._setup_and_run_http_server."""
    if not is_shielded(server_args):
        return
    from sglang.srt.entrypoints.http_server import app
    from starlette.middleware import Middleware

    # Inside of what authenticates, compresses and counts. Processes that are forked
    # from one that has it have it too.
    if all(one.cls is not RequestShield for one in app.user_middleware):
        trusts = bool(server_args.trust_request_chat_template)
        shield = Middleware(
            RequestShield, server_args.model_path, trusts_templates=trusts
        )
        app.user_middleware.append(shield)
