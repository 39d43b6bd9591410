"""What SGLang's OpenAI endpoints lack: `prediction`, its usage counts, and reports.

SGLang 0.5.23 drops `prediction`, because its request models ignore unknown fields, and
refuses `return_meta_info` with streaming. An ASGI middleware in front of the endpoints
turns the request into one that SGLang understands, and adds to the response what the
request's report says. The report arrives from TokenizerManager through a context
variable (request_hooks.py).
Source: https://platform.openai.com/docs/guides/predicted-outputs
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from sglang.srt.environ import envs
from starlette.types import Message, Receive, Scope, Send

from sglang_parse.options.request import CLIENT_TEXTS, OPTIONS, check_custom_params
from sglang_parse.options.server import ParseConfig
from sglang_parse.options.validation import (
    MAX_CLIENT_CHARS,
    check_flag,
    check_text,
    shown,
)
from sglang_parse.plugin.carried import (
    CHAT,
    GENERATE,
    OLLAMA,
    WITHOUT_OPTIONS,
    take_carried,
)
from sglang_parse.plugin.draft_prompts import draft_with_template, prompt_entries
from sglang_parse.plugin.flags import config_from_server_args
from sglang_parse.plugin.request_hooks import (
    Exchange,
    check_params,
    current_exchange,
)
from sglang_parse.sgl.compat.model_changes import hide_media
from sglang_parse.sgl.families import reads_images_of
from sglang_parse.shield.guards import read_body, replay
from sglang_parse.shield.held_answer import refuse

# SageMaker's name for it.
ALIASES = {"/invocations": CHAT}
PATHS = (CHAT, "/v1/completions", *ALIASES, *WITHOUT_OPTIONS, GENERATE)
NDJSON = b"application/x-ndjson"  # Ollama's streams
# Of each process, where several serve HTTP.
WORKER_APP = "sglang_parse.plugin.http_workers:app"
RERANK = "sglang.srt.entrypoints.openai.serving_rerank"


def translate(path: str, body: dict[str, Any], config: ParseConfig) -> Exchange:
    """Rewrite a request body in place; return what its response needs.

    config: of the server. Raises ValueError naming the field, its value and what is
    allowed.
    """
    exchange = Exchange()
    path = ALIASES.get(path, path)
    take_carried(path, body)
    if path == GENERATE:
        # Here a stream can still be refused with HTTP 400.
        check_params(body.get("sampling_params"), config)
        return exchange
    exchange.is_openai = True
    for name in body:
        if name in OPTIONS:
            raise ValueError(f"{name} would be ignored; expected custom_params.{name}.")
    if path in WITHOUT_OPTIONS:
        given = body.get("options") if path in OLLAMA else None
        limits = {**body, **given} if isinstance(given, dict) else body
        names = ("max_tokens", "max_output_tokens", "num_predict")
        limit = next((limits[name] for name in names if name in limits), None)
        exchange.is_ollama = path in OLLAMA
        custom = body.pop("custom_params", None)
        exchange.entries = check_custom_params(custom, limit, config=config)
    if path == CHAT and body.get("prediction") is not None:
        _take_prediction(body)
        exchange.add_usage = True
    # SGLang serves the field for chat without streaming; the middleware elsewhere.
    is_served = path == CHAT and not body.get("stream")
    if not is_served and body.get("return_meta_info"):
        flag = body.pop("return_meta_info")
        exchange.add_report = check_flag(flag, "return_meta_info")
    return exchange


def _take_prediction(body: dict[str, Any]) -> None:
    """Turn a chat's `prediction` into an option. Raises ValueError."""
    text = _prediction_text(body.pop("prediction"))
    custom = body.get("custom_params") or {}
    if not isinstance(custom, Mapping):
        raise ValueError(f"custom_params is {shown(custom)}; expected an object.")
    if clash := [key for key in CLIENT_TEXTS if key in custom]:
        raise ValueError(
            f"prediction and custom_params.{clash[0]} are both given; expected one."
        )
    # An empty prediction asks for the target's own answer: nothing is to be judged.
    body["custom_params"] = (
        {**custom, "parse_prediction": text}
        if text
        else {"parse_mode": "exact", **custom}
    )


def _prediction_text(prediction: Any) -> str:
    """The text of a `prediction`, its parts joined. Raises ValueError."""
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
    texts = [
        part.get("text")
        for part in parts
        if isinstance(part, Mapping) and part.get("type") == "text"
    ]
    if len(texts) < len(parts) or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"prediction.content is {shown(content)}; {expected}")
    joined = "".join(map(str, texts))
    if not joined.strip():
        return ""
    return check_text(joined, "prediction.content", MAX_CLIENT_CHARS)


class ParseEndpoints:
    """ASGI middleware. Requests that it does not concern pass through unchanged."""

    def __init__(
        self,
        app: Any,
        config: ParseConfig,
        draft_tokenizer: Any = None,
    ) -> None:
        """draft_tokenizer: of a draft that reads chats in its own template."""
        self.app = app
        self.config = config
        self.draft_tokenizer = draft_tokenizer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        # Servers put their root path before the path (--fastapi-root-path).
        path = scope.get("path", "").removeprefix(scope.get("root_path", ""))
        if scope["type"] != "http" or path not in PATHS:
            await self.app(scope, receive, send)
            return
        raw = await read_body(receive)
        if path == GENERATE and b"parse_" not in raw:
            await self.app(scope, replay(raw, receive), send)
            return
        try:
            exchange, raw = self._translate(path, raw)
        except ValueError as e:
            await refuse(send, str(e))
            return
        scope = {**scope, "headers": _with_length(scope["headers"], len(raw))}
        token = current_exchange.set(exchange)
        try:
            writer = _Amender(exchange, send) if exchange.adds else send
            await self.app(scope, replay(raw, receive), writer)
        finally:
            current_exchange.reset(token)

    def _translate(self, path: str, raw: bytes) -> tuple[Exchange, bytes]:
        """The body for SGLang, and what the response needs. Raises ValueError."""
        body, dump = _parse_request(raw)
        if not isinstance(body, dict):
            return Exchange(), raw  # SGLang says what is wrong with it
        before = body.copy()
        try:
            exchange = translate(path, body, self.config)
            if ALIASES.get(path, path) == CHAT:
                exchange.entries = prompt_entries(self.draft_tokenizer, body)
            return exchange, raw if body == before else dump(body)
        except (orjson.JSONEncodeError, RecursionError) as e:
            raise ValueError("The request body is nested too deeply.") from e


class _Amender:
    """Passes a response on, amended: JSON as a whole, a stream event by event."""

    def __init__(self, exchange: Exchange, send: Send) -> None:
        self.exchange = exchange
        self.send = send
        self.start: Message | None = None
        self.is_stream = False
        self.end = b"\n\n"
        self.held = b""

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            kind = dict(message["headers"]).get(b"content-type", b"")
            if kind.startswith(NDJSON):
                self.end = b"\n"
            self.is_stream = kind.startswith((b"text/event-stream", NDJSON))
            if self.is_stream or message["status"] != 200:
                await self.send(message)
            else:
                self.start = message
            return
        self.held += message.get("body", b"")
        more = message.get("more_body", False)
        if self.is_stream:
            *events, self.held = self.held.split(self.end)
            data = b"".join(self._event(event) + self.end for event in events)
            if not more:
                data += self.held
            await self.send({**message, "body": data})
        elif self.start is None:
            data, self.held = self.held, b""
            await self.send({**message, "body": data})
        elif not more:
            data = self._amended(self.held)
            headers = _with_length(self.start["headers"], len(data))
            await self.send({**self.start, "headers": headers})
            await self.send({**message, "body": data})

    def _event(self, event: bytes) -> bytes:
        if self.end == b"\n":
            return self._amended(event)
        name, found, data = event.partition(b"data: {")
        if not found or (name and not name.startswith(b"event: ")):
            return event
        return name + b"data: " + self._amended(b"{" + data)

    def _amended(self, raw: bytes) -> bytes:
        """A JSON object amended; anything else as it is."""
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError:
            return raw
        return (
            orjson.dumps(self.exchange.amend(body)) if isinstance(body, dict) else raw
        )


def _parse_request(raw: bytes) -> tuple[Any, Callable[[Any], bytes]]:
    """The body as SGLang reads it, and what writes it. Lone surrogates and NaN, which
    orjson refuses, reach SGLang too."""
    try:
        return orjson.loads(raw), orjson.dumps
    except orjson.JSONDecodeError:
        pass
    try:
        return json.loads(raw), lambda body: json.dumps(body).encode()
    except (ValueError, RecursionError):
        return None, orjson.dumps


def _with_length(headers: Any, length: int) -> list[tuple[bytes, bytes]]:
    kept = [(k, v) for k, v in headers if k.lower() != b"content-length"]
    return [*kept, (b"content-length", str(length).encode())]


def explain_rerank(record: logging.LogRecord) -> bool:
    """SGLang's line about "yes" and "no" is of its reranker, and looks like ours."""
    if "yes/no" in str(record.msg):
        record.msg += "; only /v1/rerank uses these, and no verdict of PARSE"
    return True


def prepare_http(server_args: Any, manager: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook on http_server._setup_and_run_http_server."""
    if server_args.tokenizer_worker_num > 1:
        envs.SGLANG_HTTP_SERVER_APP_PATH.set(WORKER_APP)
        return
    names = manager.model_config.hf_config.architectures or [""]
    hide_media(manager.model_config, images=reads_images_of(names[0]))
    add_endpoints(server_args)


def add_endpoints(server_args: Any) -> None:
    """To SGLang's application in this process."""
    from sglang.srt.entrypoints.http_server import app
    from starlette.middleware import Middleware

    logging.getLogger(RERANK).addFilter(explain_rerank)
    config = config_from_server_args(server_args)
    # The innermost: after the API key, CORS, the metrics, and decompression.
    app.user_middleware.append(
        Middleware(
            ParseEndpoints,
            config=config,
            draft_tokenizer=draft_with_template(server_args),
        )
    )
