"""The layer in front of the OpenAI endpoints, over a plain ASGI application."""

import asyncio
import importlib
import json
import logging
import os
from types import SimpleNamespace

import pytest

from sglang_parse.options.server import ParseConfig
from sglang_parse.plugin import openai as endpoints
from sglang_parse.plugin.openai import CHAT, ParseEndpoints, explain_rerank, translate
from sglang_parse.plugin.request_hooks import Exchange, follow_request
from tests.support.fake_manager import FakeManager

CONFIG = ParseConfig()
MANAGER = FakeManager()
REPORT = {"mode": "exact", "client_text_tokens": 7, "accepted_client_text_tokens": 5}


def prediction(content) -> dict:
    return {"prediction": {"type": "content", "content": content}}


def test_sglangs_line_about_a_reranker_is_told_from_our_verdicts():
    """Red if a start-up line about yes and no looks like one of PARSE."""
    told = "Using fallback token IDs for yes/no (9693/2152)"
    record = logging.LogRecord("", logging.WARNING, "", 1, told, None, None)
    assert explain_rerank(record) and "/v1/rerank" in record.getMessage()


@pytest.mark.parametrize("content", ["", " \n", []])
def test_empty_prediction_is_followed_too(content):
    """Red if a client that predicts an empty file gets a judged answer."""
    body = prediction(content)
    assert translate(CHAT, body, CONFIG).add_usage
    assert body == {"custom_params": {"parse_mode": "exact"}}
    body = {**prediction(content), "custom_params": {"parse_mode": "semantic"}}
    translate(CHAT, body, CONFIG)
    assert body == {"custom_params": {"parse_mode": "semantic"}}


def test_text_completions_have_no_prediction():
    """Red if a field that OpenAI defines for chat only is served elsewhere."""
    body = prediction("some text")
    assert not translate("/v1/completions", body, CONFIG).adds
    assert "prediction" in body


@pytest.mark.parametrize(
    ("path", "stream", "ours"),
    [(CHAT, False, False), (CHAT, True, True), ("/v1/completions", False, True)],
)
def test_return_meta_info_is_taken_over_where_sglang_lacks_it(path, stream, ours):
    """Red if SGLang refuses the field, or loses it where it serves it itself."""
    body = {"return_meta_info": True, "stream": stream}
    assert translate(path, body, CONFIG).add_report == ours
    assert ("return_meta_info" in body) != ours


def test_invocations_are_chat_completions():
    """Red if a prediction is dropped under SageMaker's path."""
    body = prediction("some text")
    assert translate("/invocations", body, CONFIG).add_usage
    assert body == {"custom_params": {"parse_prediction": "some text"}}


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        (CHAT, {"parse_mode": "exact"}, "expected custom_params.parse_mode."),
        (
            "/v1/completions",
            {"parse_threshold": 1, "custom_params": {}},
            "parse_threshold would be ignored; expected custom_params.parse_threshold.",
        ),
        ("/v1/responses", {"parse_mode": "off"}, "expected custom_params.parse_mode."),
        (
            "/v1/messages",
            {"custom_params": {"parse_mode": "off"}, "metadata": {"parse_mode": "a"}},
            "parse_mode is given twice, once in metadata",
        ),
        ("/v1/responses", {"metadata": {"parse_mode": "a"}}, "parse_mode is 'a'"),
    ],
)
def test_options_that_would_be_dropped_are_refused(path, body, message):
    """Red if who asks for exact answers is served others, and not told."""
    with pytest.raises(ValueError, match=message):
        translate(path, body, CONFIG)


@pytest.mark.parametrize("path", endpoints.PATHS)
def test_what_is_no_option_of_ours_passes(path):
    """Red if fields that only look like ours are refused."""
    body = {"custom_params": {"theirs": 1}, "parse_tools": True, "custom": []}
    assert not translate(path, dict(body), CONFIG).adds
    assert not translate(path, {"custom_params": "text"}, CONFIG).adds


@pytest.mark.parametrize("path", ["/v1/messages", "/v1/responses"])
def test_options_reach_endpoints_without_custom_params(path):
    """Red if an option in `metadata` is dropped, or a report has no place there."""
    body = {"metadata": {"parse_threshold": "0.7", "return_meta_info": "true", "a": 1}}
    exchange = translate(path, body, CONFIG)
    assert body == {"metadata": {"a": 1}}
    assert exchange.entries == {"parse_threshold": 0.7} and exchange.add_report
    exchange.reports[0] = REPORT
    told = {"meta_info": {"parse": [REPORT]}}
    for answer in ({"type": "message"}, {"object": "response"}):
        assert exchange.amend(dict(answer)) == answer | told
    for event in ({"type": "message_start", "message": {}}, {"response": None}):
        assert exchange.amend(dict(event)) == event
    last = exchange.amend({"type": "x", "response": {"object": "response"}})
    assert last["response"] == {"object": "response"} | told


def test_amend_adds_counts_and_reports():
    """Red if counts do not add up or land on chunks without usage."""
    exchange = Exchange(add_report=True, add_usage=True, reports={0: REPORT})
    whole = {
        "choices": [{"index": 0, "finish_reason": "stop"}],
        "usage": {"completion_tokens": 9, "completion_tokens_details": None},
    }
    exchange.amend(whole)
    assert whole["choices"][0]["meta_info"] == {"parse": [REPORT]}
    assert whole["usage"]["completion_tokens_details"] == {
        "accepted_prediction_tokens": 5,
        "rejected_prediction_tokens": 2,
    }
    middle = {"choices": [{"index": 0, "finish_reason": None}], "usage": None}
    assert exchange.amend(dict(middle)) == middle


# -- The ASGI layer ----------


class App:
    """Answers with `parts`; notes the body it got and passes the report on."""

    def __init__(self, parts: list[bytes], content_type: bytes, status: int = 200):
        self.parts = parts
        self.headers = [(b"content-type", content_type), (b"content-length", b"1")]
        self.status = status
        self.body: bytes | None = None

    async def __call__(self, scope, receive, send):
        message = await receive()
        self.body = message["body"]
        length = dict(scope["headers"])[b"content-length"]
        assert int(length) == len(self.body)

        async def outputs():
            yield {"index": 0, "meta_info": {"parse": [REPORT]}}

        async for _ in follow_request(outputs(), MANAGER, None):
            pass
        await send(
            {
                "type": "http.response.start",
                "status": self.status,
                "headers": self.headers,
            }
        )
        for i, part in enumerate(self.parts):
            more = i + 1 < len(self.parts)
            await send({"type": "http.response.body", "body": part, "more_body": more})


def call(
    app, body: bytes, path: str = CHAT, chunks: int = 1, root_path: str = ""
) -> tuple[int, dict, bytes]:
    sent: list[dict] = []
    size = -(-len(body) // chunks) or 1
    messages = [
        {
            "type": "http.request",
            "body": body[k : k + size],
            "more_body": k + size < len(body),
        }
        for k in range(0, max(1, len(body)), size)
    ]

    async def receive():
        return messages.pop(0) if messages else {"type": "http.disconnect"}

    async def send(message):
        sent.append(message)

    headers = [(b"content-length", str(len(body)).encode())]
    scope = {"type": "http", "path": root_path + path, "headers": headers}
    scope["root_path"] = root_path
    asyncio.run(ParseEndpoints(app, CONFIG)(scope, receive, send))
    start, *rest = sent
    return start["status"], dict(start["headers"]), b"".join(m["body"] for m in rest)


def test_plain_requests_pass_unchanged():
    """Red if a request without our fields is rewritten or its response held back."""
    app = App([b'{"choices": []}'], b"application/json")
    body = b'{"messages":  []}'
    status, headers, out = call(app, body, chunks=3)
    assert (status, out, app.body) == (200, b'{"choices": []}', body)
    assert headers[b"content-length"] == b"1"


def test_root_path_is_not_part_of_the_path():
    """Red if --fastapi-root-path switches predictions off."""
    app = App([b'{"choices": []}'], b"application/json")
    call(app, json.dumps(prediction("text")).encode(), root_path="/api")
    assert json.loads(app.body) == {"custom_params": {"parse_prediction": "text"}}


def test_deep_body_is_refused():
    """Red if a body that can be read and not written again is a server error."""
    deep: dict = {}
    for _ in range(280):
        deep = {"a": deep}
    body = json.dumps({**prediction("text"), "response_format": deep}).encode()
    status, _, out = call(App([], b"application/json"), body)
    assert status == 400 and b"nested too deeply" in out


def test_what_only_json_reads_is_understood_too():
    """Red if a prediction is dropped in silence because of a lone surrogate or a NaN,
    which SGLang takes."""
    app = App([b'{"choices": []}'], b"application/json")
    body = b'{"prediction": {"type": "content", "content": "abc\\ud800"}}'
    status, _, out = call(app, body)
    assert status == 400 and b"prediction.content" in out
    field = b'"prediction": {"type": "content", "content": "abc"}'
    assert call(app, b'{%s, "x": NaN, "y": "\\ud800"}' % field)[0] == 200
    asked = json.loads(app.body)
    assert asked.pop("x") != asked.get("x")
    assert asked == {"custom_params": {"parse_prediction": "abc"}, "y": "\ud800"}


def test_broken_json_is_left_to_sglang():
    """Red if our layer answers what SGLang would answer better."""
    app = App([b"no"], b"text/plain", status=400)
    assert call(app, b'{"prediction": ')[::2] == (400, b"no")


def test_error_responses_pass_unamended():
    """Red if an error of SGLang's is swallowed."""
    app = App([b'{"object": "error"}'], b"application/json", status=400)
    body = json.dumps(prediction("text")).encode()
    assert call(app, body)[::2] == (400, b'{"object": "error"}')


@pytest.mark.parametrize("cut", [1, 7, 40, 1000])
def test_stream_events_are_amended_wherever_they_are_cut(cut):
    """Red if an event split over two messages is lost or doubled."""
    events = [
        {"choices": [{"index": 0, "finish_reason": None}], "usage": None},
        {"choices": [{"index": 0, "finish_reason": "stop"}], "usage": None},
        {"choices": [], "usage": {"completion_tokens": 4}},
    ]
    data = b"".join(b"data: " + json.dumps(e).encode() + b"\n\n" for e in events)
    data += b"data: [DONE]\n\n"
    parts = [data[k : k + cut] for k in range(0, len(data), cut)]
    app = App(parts, b"text/event-stream; charset=utf-8")
    body = {**prediction("text"), "stream": True, "return_meta_info": True}
    _, _, out = call(app, json.dumps(body).encode())
    *lines, done, rest = out.split(b"\n\n")
    assert (done, rest) == (b"data: [DONE]", b"")
    first, last, usage = (json.loads(line[6:]) for line in lines)
    assert first == events[0]
    assert last["choices"][0]["meta_info"] == {"parse": [REPORT]}
    assert (
        usage["usage"]["completion_tokens_details"]["rejected_prediction_tokens"] == 2
    )


def test_the_layer_is_the_innermost(monkeypatch):
    """Red if refusals lack what SGLang's layers add, or bodies come in compressed."""
    from sglang.srt.entrypoints import http_server
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.middleware.cors import CORSMiddleware

    app = Starlette(middleware=[Middleware(CORSMiddleware)])
    monkeypatch.setattr(http_server, "app", app)
    args = SimpleNamespace(
        speculative_algorithm="parse", speculative_draft_model_path=None
    )
    endpoints.add_endpoints(args)
    app.add_middleware(CORSMiddleware)
    kinds = [one.cls for one in app.user_middleware]
    assert kinds == [*[CORSMiddleware] * 2, ParseEndpoints]
    layer, order = app.build_middleware_stack(), []
    while hasattr(layer, "app"):
        order.append(type(layer))
        layer = layer.app
    assert order.index(ParseEndpoints) > max(
        at for at, kind in enumerate(order) if kind is CORSMiddleware
    )


def test_each_of_several_processes_imports_our_application(monkeypatch):
    """Red if processes that SGLang starts without plugins serve HTTP without ours."""
    monkeypatch.setenv("SGLANG_HTTP_SERVER_APP_PATH", "its:own")
    endpoints.prepare_http(SimpleNamespace(tokenizer_worker_num=2), None)
    module, _, name = os.environ["SGLANG_HTTP_SERVER_APP_PATH"].partition(":")
    assert callable(importlib.import_module(module).__getattr__) and name == "app"


def test_refusal_names_the_field():
    """Red if a forbidden combination reaches SGLang."""
    app = App([], b"")
    both = prediction("text") | {"custom_params": {"parse_draft": "a"}}
    status, _, out = call(app, json.dumps(both).encode())
    assert status == 400 and app.body is None
    assert "custom_params.parse_draft are both given" in json.loads(out)["message"]


def test_other_paths_and_lifespan_pass():
    """Red if the layer touches anything but its endpoints."""
    app = App([b"ok"], b"text/plain")
    body = json.dumps(prediction("text")).encode()
    assert call(app, body, path="/encode")[2] == b"ok"
    assert app.body == body
    assert call(app, body, path="/generate")[2] == b"ok"
    assert app.body == body


@pytest.mark.parametrize("batch", [False, True])
def test_a_wrong_option_of_generate_is_refused_before_a_stream_begins(batch):
    """Red if a streamed /generate is answered with HTTP 200 and an error event."""
    params = {"custom_params": {"parse_mode": "loud"}}
    body = {"stream": True, "sampling_params": [{}, params] if batch else params}
    status, _, out = call(App([], b""), json.dumps(body).encode(), path="/generate")
    assert status == 400 and "parse_mode is 'loud'" in json.loads(out)["message"]


@pytest.mark.parametrize(("name", "reads"), [("a", True), ("b", False)])
def test_a_server_that_refuses_images_does_not_say_that_it_reads_them(
    name, reads, monkeypatch
):
    """Red if SGLang warms up with an image that is refused, which ends the server."""
    monkeypatch.setattr(endpoints, "add_endpoints", lambda args: None)
    monkeypatch.setattr(endpoints, "reads_images_of", "a".__eq__)
    config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[name]),
        is_image_understandable_model=True,
        is_audio_understandable_model=True,
    )
    args = SimpleNamespace(tokenizer_worker_num=1)
    endpoints.prepare_http(args, SimpleNamespace(model_config=config))
    assert config.is_image_understandable_model == reads
    assert not config.is_audio_understandable_model
