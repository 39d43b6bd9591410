"""Where requests meet the checks of shield.py on a PARSE server.

Four seams: `TokenizerManager.init_model_config`, which says what can be read;
`TokenizerManager._create_tokenized_object`, whose result the scheduler gets;
`TokenizerManager.generate_request` around it; and an ASGI layer around both. What
raises before the scheduler has a part of the request is the request's own fault, and
answered with HTTP 400.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import AsyncIterator, Callable
from typing import Any

from sglang_parse.integration.answers import (
    Answer,
    Message,
    Progress,
    Receive,
    Scope,
    Send,
    refuse,
    status_of,
)
from sglang_parse.integration.flags import config_from_server_args
from sglang_parse.integration.shield import (
    problem_of,
    problem_of_input,
    problem_of_media,
    told_of,
)
from sglang_parse.integration.shield_checks import drop_unknown_stops
from sglang_parse.runtime.compat.models import hide_media
from sglang_parse.runtime.families import reads_images_of
from sglang_parse.runtime.names import is_parse

logger = logging.getLogger(__name__)

# Endpoints that do nothing but read the request until the scheduler has it.
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
NOT_AN_OBJECT = "The request body is no JSON object; expected one."


_progress: contextvars.ContextVar[Progress | None] = contextvars.ContextVar(
    "sglang_parse_progress", default=None
)


def checks_requests(server_args: Any) -> bool:
    """Whether a server has the shield: a PARSE server that is not told otherwise."""
    return (
        is_parse(server_args.speculative_algorithm)
        and config_from_server_args(server_args).request_checks
    )


def _is_shielded(manager: Any) -> bool:
    """`checks_requests` of a TokenizerManager's server, found once."""
    known = vars(manager).get("_parse_request_checks")
    if known is None:
        known = manager._parse_request_checks = checks_requests(manager.server_args)
    return bool(known)


def check_ready(
    original: Callable[..., Any], manager: Any, *args: Any, **kwargs: Any
) -> Any:
    """AROUND hook on TokenizerManager._create_tokenized_object. Raises ValueError."""
    if not _is_shielded(manager):
        return original(manager, *args, **kwargs)
    try:
        tokenized = original(manager, *args, **kwargs)
    except ValueError:
        raise
    except Exception as e:
        raise ValueError(told_of(e)) from e
    is_generation = hasattr(tokenized, "return_logprob")
    told = is_generation and problem_of(tokenized, manager.model_config.vocab_size)
    if told:
        raise ValueError(told)
    if is_generation:
        params = tokenized.sampling_params
        drop_unknown_stops(params, manager.model_config.vocab_size)
    if progress := _progress.get():
        progress.is_ready = True
    return tokenized


def tell_what_is_read(result: None, manager: Any) -> None:
    """AFTER hook on TokenizerManager.init_model_config: /model_info names no images and
    no audio where requests with them are refused."""
    config = manager.model_config
    names = getattr(config.hf_config, "architectures", None) or [""]
    if not _is_shielded(manager):
        return
    hide_media(config, images=reads_images_of(names[0]))


class Guarded:
    """The outputs of a request; an error before there can be any is a ValueError."""

    def __init__(self, outputs: AsyncIterator[Any], told: str = "") -> None:
        """told: why there are to be none, as one sentence."""
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
            return await self.outputs.__anext__()
        except (ValueError, StopAsyncIteration):
            raise
        except Exception as e:
            if progress.is_ready:
                raise
            raise ValueError(told_of(e)) from e

    async def aclose(self) -> None:
        await self.outputs.aclose()  # type: ignore[attr-defined]


def guard_outputs(result: AsyncIterator[Any], manager: Any, obj: Any) -> Any:
    """The outputs of TokenizerManager.generate_request(obj), guarded where asked."""
    if not _is_shielded(manager):
        return result
    told = problem_of_input(obj)
    if not told and manager.mm_processor is not None:
        (architecture, *_) = manager.model_config.hf_config.architectures
        told = problem_of_media(obj, architecture)
    return Guarded(result, told)


class RequestShield:
    """ASGI layer: HTTP 500 before the scheduler has the request becomes HTTP 400, and
    no response breaks off."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path not in PATHS:
            await self.app(scope, receive, send)
            return
        progress = Progress()
        answer = Answer(progress, send)
        token = _progress.set(progress)
        try:
            await self.app(scope, _watched(receive, progress), answer)
        except Exception as e:
            if not answer.has_started and not progress.is_ready:
                logger.warning("PARSE refused a request of %s", path, exc_info=True)
                await refuse(send, told_of(e) if progress.is_object else NOT_AN_OBJECT)
                return
            status, told = status_of(e)
            await answer.fail(status, told)
            if status == 500:
                raise  # for the log
        finally:
            _progress.reset(token)


def _watched(receive: Receive, progress: Progress) -> Receive:
    """Notes whether the body begins with a brace."""
    is_first = True

    async def watched() -> Message:
        nonlocal is_first
        message = await receive()
        if is_first:
            is_first = False
            progress.is_object = message.get("body", b"{").lstrip()[:1] in (b"{", b"")
        return message

    return watched


def add_shield(server_args: Any) -> None:
    """Put the layer in front of SGLang's endpoints, where it is asked for."""
    if not checks_requests(server_args):
        return
    from sglang.srt.entrypoints.http_server import app
    from starlette.middleware import Middleware

    # Inside of what authenticates, compresses and counts.
    app.user_middleware.append(Middleware(RequestShield))
