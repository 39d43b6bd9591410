"""What the OpenAI endpoints lack: `prediction`, its usage counts, reports in streams.

SGLang 0.5.23 drops `prediction` (its request models ignore unknown fields) and refuses
`return_meta_info` with streaming. An ASGI layer in front of the two endpoints turns the
request into one that SGLang understands and adds to the response what the request's
report says. The report reaches it from TokenizerManager through a context variable of
the HTTP request. Source: https://platform.openai.com/docs/guides/predicted-outputs
"""

from __future__ import annotations

import contextvars
import json
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import orjson

from sglang_parse.integration.answers import Message, Receive, Scope, Send, refuse
from sglang_parse.integration.carried import CHAT, GENERATE, may_carry, take_carried
from sglang_parse.integration.draft_prompts import DraftPrompts, set_entries
from sglang_parse.integration.flags import config_from_server_args
from sglang_parse.integration.shield_hooks import add_shield, guard_outputs
from sglang_parse.options.checks import (
    MAX_CLIENT_CHARS,
    check_flag,
    check_text,
    shown,
)
from sglang_parse.options.request import CLIENT_TEXTS, OPTIONS
from sglang_parse.probe.pairs_route import add_pairs_route
from sglang_parse.runtime.names import is_parse

# SageMaker's name for it.
ALIASES = {"/invocations": CHAT}
# Their request models know no custom_params, and drop them.
WITHOUT_OPTIONS = ("/v1/responses", "/v1/messages")
PATHS = (CHAT, "/v1/completions", *ALIASES, *WITHOUT_OPTIONS)


@dataclass
class Exchange:
    """One HTTP request: what to add to its response.

    reports: `meta_info["parse"][0]` by choice, as they come. entries: of
    `custom_params`, for the drafters.
    """

    add_report: bool = False
    add_usage: bool = False
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    entries: dict[str, Any] = field(default_factory=dict)

    @property
    def adds(self) -> bool:
        return self.add_report or self.add_usage

    def amend(self, body: dict[str, Any]) -> dict[str, Any]:
        """A response or stream chunk with reports and prediction counts added."""
        for choice in body.get("choices") or ():
            report = self.reports.get(choice.get("index", 0))
            if self.add_report and report and choice.get("finish_reason"):
                choice["meta_info"] = {"parse": [report]}
        usage = body.get("usage")
        if self.add_usage and usage and self.reports:
            (report, *_) = self.reports.values()
            accepted = report.get("accepted_client_text_tokens", 0)
            total = report.get("client_text_tokens", 0)
            details = usage.get("completion_tokens_details") or {}
            usage["completion_tokens_details"] = details | {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": total - accepted,
            }
        return body


_exchange: contextvars.ContextVar[Exchange | None] = contextvars.ContextVar(
    "sglang_parse_exchange", default=None
)


def watch_outputs(
    result: AsyncIterator[Any], manager: Any, obj: Any, *_: Any, **__: Any
) -> Any:
    """AFTER hook on TokenizerManager.generate_request: keep the reports that pass."""
    result = guard_outputs(result, manager, obj)
    exchange = _exchange.get()
    set_entries(obj, exchange.entries if exchange else {})
    return result if exchange is None else _watch(result, exchange)


async def _watch(outputs: AsyncIterator[Any], exchange: Exchange) -> AsyncIterator[Any]:
    async for output in outputs:
        for at, one in enumerate(output if isinstance(output, list) else [output]):
            if reports := one.get("meta_info", {}).get("parse"):
                exchange.reports[one.get("index", at)] = reports[-1]
        yield output


def translate(path: str, body: dict[str, Any]) -> Exchange:
    """Rewrite a request body in place; say what its response needs.

    Raises ValueError naming the field, its value and what is allowed.
    """
    exchange = Exchange()
    path = ALIASES.get(path, path)
    take_carried(path, body)
    if path == GENERATE:
        return exchange
    _check_places(path, body)
    if path in WITHOUT_OPTIONS:
        return exchange
    if path == CHAT and body.get("prediction") is not None:
        text = _prediction_text(body.pop("prediction"))
        _check_combination(body)
        custom = body.get("custom_params") or {}
        if not isinstance(custom, Mapping):
            raise ValueError(f"custom_params is {shown(custom)}; expected an object.")
        if clash := [key for key in CLIENT_TEXTS if key in custom]:
            raise ValueError(
                f"prediction and custom_params.{clash[0]} are both given; expected one."
            )
        # Without a text nobody says that it is to be judged: the target's own answer.
        body["custom_params"] = (
            {**custom, "parse_prediction": text}
            if text
            else {"parse_mode": "exact", **custom}
        )
        exchange.add_usage = True
    # SGLang has the field for chat without streaming; we serve the rest.
    if body.get("return_meta_info") and (path != CHAT or body.get("stream")):
        exchange.add_report = check_flag(
            body.pop("return_meta_info"), "return_meta_info"
        )
    return exchange


def _check_places(path: str, body: Mapping[str, Any]) -> None:
    """No option stands where SGLang would drop it without a word."""
    custom = body.get("custom_params")
    inside = (
        [key for key in custom if key in OPTIONS] if isinstance(custom, dict) else ()
    )
    if path in WITHOUT_OPTIONS and inside:
        raise ValueError(
            f"custom_params.{inside[0]} would be ignored on {path}; expected on {CHAT}."
        )
    carried = body.get("metadata")
    if path in WITHOUT_OPTIONS and isinstance(carried, dict):
        inside = [key for key in carried if key in OPTIONS]
        if inside:
            raise ValueError(
                f"metadata.{inside[0]} would be ignored on {path}; expected on {CHAT}."
            )
    if beside := [key for key in body if key in OPTIONS]:
        where = f" on {CHAT}" if path in WITHOUT_OPTIONS else ""
        raise ValueError(
            f"{beside[0]} would be ignored where it stands; expected "
            f"custom_params.{beside[0]}{where}."
        )


def _prediction_text(prediction: Any) -> str:
    """The text of a `prediction`; its parts joined."""
    expected = (
        'expected {"type": "content", "content": TEXT}, TEXT a string or a list of '
        '{"type": "text", "text": STRING}.'
    )
    if not isinstance(prediction, Mapping) or prediction.get("type") != "content":
        raise ValueError(f"prediction is {shown(prediction)}; {expected}")
    content = prediction.get("content")
    parts = (
        content if isinstance(content, list) else [{"type": "text", "text": content}]
    )
    texts: list[str] = []
    for part in parts:
        is_text = isinstance(part, Mapping) and part.get("type") == "text"
        text = part["text"] if is_text and "text" in part else None
        if not isinstance(text, str):
            raise ValueError(f"prediction.content is {shown(content)}; {expected}")
        texts.append(text)
    joined = "".join(texts)
    # Nothing predicted is a prediction too: everything is the target's own.
    if not joined.strip():
        return ""
    return check_text(joined, "prediction.content", MAX_CLIENT_CHARS)


# What OpenAI does not allow beside a prediction, with the values it does.
_FORBIDDEN: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("n", lambda v: v == 1, "1"),
    ("logprobs", lambda v: v is False, "false"),
    ("top_logprobs", lambda v: v == 0, "0"),
    ("presence_penalty", lambda v: _at_most_zero(v), "at most 0"),
    ("frequency_penalty", lambda v: _at_most_zero(v), "at most 0"),
    ("max_completion_tokens", lambda v: False, "none (max_tokens is allowed)"),
    ("tools", lambda v: v == [], "none"),
    ("functions", lambda v: v == [], "none"),
    ("audio", lambda v: False, "none"),
    ("modalities", lambda v: v == ["text"], '["text"]'),
)


def _at_most_zero(value: Any) -> bool:
    return isinstance(value, (int, float)) and value <= 0


def _check_combination(body: Mapping[str, Any]) -> None:
    for name, is_allowed, expected in _FORBIDDEN:
        value = body.get(name)
        if value is not None and not is_allowed(value):
            raise ValueError(
                f"{name} is {shown(value)}; expected {expected} with prediction."
            )


class ParseEndpoints:
    """ASGI layer. Requests it has nothing to do for pass through unchanged."""

    def __init__(self, app: Any, prompts: DraftPrompts | None = None) -> None:
        self.app = app
        self.prompts = prompts or DraftPrompts()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Servers put their root path before the path (--fastapi-root-path).
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path not in (*PATHS, GENERATE):
            await self.app(scope, receive, send)
            return
        raw = await _read_body(receive)
        if path == GENERATE and not may_carry(path, raw):
            await self.app(scope, _replay(raw, receive), send)
            return
        body, dump = _parse_request(raw)
        exchange = Exchange()
        if isinstance(body, dict):
            try:
                before = body.copy()
                exchange = translate(path, body)
                if ALIASES.get(path, path) == CHAT:
                    exchange.entries = self.prompts.entries_of(body)
                if body != before:
                    raw = dump(body)
            except (orjson.JSONEncodeError, RecursionError):
                await refuse(send, "The request body is nested too deeply.")
                return
            except ValueError as e:
                await refuse(send, str(e))
                return
            scope = {**scope, "headers": _with_length(scope["headers"], len(raw))}
        token = _exchange.set(exchange)
        try:
            writer = _Amender(exchange, send) if exchange.adds else send
            await self.app(scope, _replay(raw, receive), writer)
        finally:
            _exchange.reset(token)


class _Amender:
    """Passes a response on, amended: JSON as a whole, a stream event by event."""

    def __init__(self, exchange: Exchange, send: Send) -> None:
        self.exchange = exchange
        self.send = send
        self.start: Message | None = None
        self.is_stream = False
        self.held = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            self.is_stream = kind.startswith(b"text/event-stream")
            if self.is_stream or message["status"] != 200:
                await self.send(message)
            else:
                self.start = message
            return
        self.held += message.get("body", b"")
        more = message.get("more_body", False)
        if self.is_stream:
            *events, self.held = self.held.split(b"\n\n")
            data = b"".join(self._event(event) + b"\n\n" for event in events)
            if not more:
                data += self.held
            await self.send({**message, "body": data})
        elif self.start is None:
            data, self.held = self.held, b""
            await self.send({**message, "body": data})
        elif not more:
            body = _parse(self.held)
            if isinstance(body, dict):
                self.held = orjson.dumps(self.exchange.amend(body))
            headers = _with_length(self.start["headers"], len(self.held))
            await self.send({**self.start, "headers": headers})
            await self.send({**message, "body": self.held})

    def _event(self, event: bytes) -> bytes:
        if not event.startswith(b"data: {"):
            return event
        body = _parse(event[6:])
        if not isinstance(body, dict):
            return event
        return b"data: " + orjson.dumps(self.exchange.amend(body))


async def _read_body(receive: Receive) -> bytes:
    parts: list[bytes] = []
    while True:
        message = await receive()
        if message["type"] != "http.request":
            return b"".join(parts)
        parts.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(parts)


def _replay(raw: bytes, receive: Receive) -> Receive:
    """The body once, then whatever the client does next (a disconnect)."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": raw, "more_body": False}

    return replay


def _parse(raw: bytes) -> Any:
    try:
        return orjson.loads(raw)
    except orjson.JSONDecodeError:
        return None


def _parse_request(raw: bytes) -> tuple[Any, Callable[[Any], bytes]]:
    """The body as SGLang reads it, and what writes it: lone surrogates and NaN, which
    orjson refuses, reach SGLang too."""
    try:
        return orjson.loads(raw), orjson.dumps
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(raw), lambda body: json.dumps(body).encode()
    except (ValueError, RecursionError):
        return None, orjson.dumps  # SGLang says what is wrong with it


def _with_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    kept = [(k, v) for k, v in headers if k.lower() != b"content-length"]
    return [*kept, (b"content-length", str(length).encode())]


def add_endpoints(server_args: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook on http_server._setup_and_run_http_server."""
    if not is_parse(server_args.speculative_algorithm):
        return
    from sglang.srt.entrypoints.http_server import app
    from starlette.middleware import Middleware

    add_pairs_route(app, config_from_server_args(server_args))
    add_shield(server_args)
    # The innermost: behind the API key, CORS, the metrics, and decompression.
    app.user_middleware.append(
        Middleware(ParseEndpoints, prompts=DraftPrompts.of(server_args))
    )
