"""Errors before the scheduler has a request are HTTP 400, later ones are not."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import pytest
from fastapi import HTTPException
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_parse.integration import shield, shield_hooks
from sglang_parse.integration.shield_hooks import RequestShield, _progress
from tests.unit.integration.test_shield import VOCAB, tokenized


def manager(algorithm="PARSE", **options):
    return SimpleNamespace(
        server_args=SimpleNamespace(
            speculative_algorithm=algorithm, _parse_options=options
        ),
        model_config=SimpleNamespace(vocab_size=VOCAB),
        mm_processor=None,
    )


def raises(error):
    def original(*args):
        raise error

    return original


def test_a_request_that_is_fine_passes():
    """Red if the hook loses SGLang's result."""
    one = tokenized()
    assert shield_hooks.check_ready(lambda m, obj: one, manager(), None) is one


def test_a_hostile_request_is_a_value_error():
    """Red if the checks are not asked."""
    with pytest.raises(ValueError, match="no tokens"):
        shield_hooks.check_ready(lambda m, obj: tokenized([]), manager(), None)


@pytest.mark.parametrize(
    "one", [manager("EAGLE"), manager(None), manager(request_checks=False)]
)
def test_other_servers_are_left_alone(one):
    """Red if SGLang's own servers, or one with the switch, are changed."""
    empty = tokenized([])
    assert shield_hooks.check_ready(lambda m, obj: empty, one, None) is empty
    with pytest.raises(KeyError):
        shield_hooks.check_ready(raises(KeyError("x")), one, None)
    outputs = object()
    assert shield_hooks.guard_outputs(outputs, one, None) is outputs


def test_what_sglang_raises_on_fields_is_a_value_error():
    """Red if a broken stop_regex is HTTP 500 in a stream."""
    with pytest.raises(ValueError, match=r"cannot be read \(TypeError: 'no'\)"):
        shield_hooks.check_ready(raises(TypeError("no")), manager(), None)


async def _outputs(error, ready):
    if ready:
        shield_hooks.check_ready(lambda m: tokenized(), manager())
    if error:
        raise error
    yield 1


@pytest.mark.parametrize(("ready", "kind"), [(False, ValueError), (True, RuntimeError)])
def test_only_errors_before_the_scheduler_are_the_requests(ready, kind):
    """Red if a server's fault is told as the request's, or the other way round."""

    async def run():
        outputs = _outputs(RuntimeError("x"), ready)
        return [x async for x in shield_hooks.guard_outputs(outputs, manager(), None)]

    with pytest.raises(kind):
        asyncio.run(run())


def test_outputs_pass_the_guard():
    """Red if an output is lost."""

    async def run():
        outputs = shield_hooks.guard_outputs(_outputs(None, True), manager(), None)
        return [x async for x in outputs]

    assert asyncio.run(run()) == [1]


@pytest.mark.parametrize("params", [{"n": 2**31}, [{}, {"n": 5000}]])
def test_more_answers_than_there_is_memory_for_are_refused(params):
    """Red if SGLang copies a request two thousand million times."""
    obj = SimpleNamespace(sampling_params=params)
    outputs = shield_hooks.guard_outputs(_outputs(None, True), manager(), obj)
    with pytest.raises(ValueError, match=r"^n is \d+; expected at most 4096"):
        asyncio.run(outputs.__anext__())


PROVEN, UNPROVEN = "Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration"
IMAGE, VIDEO = {"image_data": ["image"]}, {"video_data": ["video"]}


@pytest.mark.parametrize(
    ("name", "media", "told"),
    [
        (UNPROVEN, {}, ""),
        (UNPROVEN, IMAGE, "The request has images.*Gemma3.*send text alone"),
        (PROVEN, IMAGE, ""),
        (PROVEN, IMAGE | VIDEO, "The request has video.*send text and images"),
    ],
)
@pytest.mark.parametrize("processor", [None, object()])
def test_unproven_media_for_a_multimodal_model_are_refused(
    name, media, told, processor, monkeypatch
):
    """Red if a request that no test has proven reaches the scheduler, or one that is
    proven does not."""
    monkeypatch.setattr(shield, "reads_images_of", PROVEN.__eq__)
    one = manager()
    one.mm_processor = processor
    one.model_config.hf_config = SimpleNamespace(architectures=[name])
    obj = GenerateReqInput(text="Hi", sampling_params={}, **media)
    outputs = shield_hooks.guard_outputs(_outputs(None, True), one, obj)
    if told and processor:
        with pytest.raises(ValueError, match=told):
            asyncio.run(outputs.__anext__())
    else:
        assert asyncio.run(outputs.__anext__()) == 1


@pytest.mark.parametrize(("name", "reads"), [(PROVEN, True), (UNPROVEN, False)])
def test_a_server_that_refuses_images_does_not_say_that_it_reads_them(
    name, reads, monkeypatch
):
    """Red if SGLang warms up with an image that is refused, which ends the server."""
    monkeypatch.setattr(shield_hooks, "reads_images_of", PROVEN.__eq__)
    one = manager()
    one.model_config = SimpleNamespace(
        hf_config=SimpleNamespace(architectures=[name]),
        is_image_understandable_model=True,
        is_audio_understandable_model=True,
    )
    shield_hooks.tell_what_is_read(None, one)
    assert one.model_config.is_image_understandable_model == reads
    assert not one.model_config.is_audio_understandable_model


def respond(status, body):
    async def app(scope, receive, send):
        await receive()
        start = {"type": "http.response.start", "status": status, "headers": []}
        await send(start)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    return app


def call(app, body=b"{}", path="/generate"):
    """(status, body) of one POST through the layer."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message):
        sent.append(message)

    asyncio.run(RequestShield(app)({"type": "http", "path": path}, receive, send))
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:])


def test_answers_pass_the_layer():
    """Red if an answer, or SGLang's own HTTP 400, is changed."""
    assert call(respond(200, b"yes")) == (200, b"yes")
    assert call(respond(400, b"no")) == (400, b"no")


def test_early_500s_become_400s():
    """Red if an error of the OpenAI handlers stays HTTP 500."""
    status, _ = call(respond(501, b'{"message": "It does not stream."}'))
    assert status == 400
    status, body = call(respond(500, b'{"message": "Internal server error: no rid"}'))
    assert status == 400 and "no rid" in json.loads(body)["message"]
    assert call(respond(500, b"oops"), path="/server_info") == (500, b"oops")


def test_500s_behind_the_scheduler_stay():
    """Red if a fault of the server is told as the request's."""

    async def app(*args):
        _progress.get().is_ready = True
        await respond(500, b"fault")(*args)

    assert call(app) == (500, b"fault")


@pytest.mark.parametrize(
    ("body", "told"), [(b"{}", "AttributeError"), (b" null", "no JSON object")]
)
def test_exceptions_become_400s(body, told):
    """Red if a body that is no object, or Ollama's options, end in HTTP 500."""

    async def app(scope, receive, send):
        await receive()
        raise AttributeError("x")

    status, answer = call(app, body)
    assert status == 400 and told in json.loads(answer)["message"]


def answer_of(app, error=None, path="/generate"):
    """(status, body, whether it is whole) of one POST, and what came through."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": b"{}", "more_body": False}

    async def send(message):
        sent.append(message)

    with pytest.raises(error) if error else contextlib.nullcontext():
        asyncio.run(RequestShield(app)({"type": "http", "path": path}, receive, send))
    is_whole = not sent[-1].get("more_body", False)
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:]), is_whole


def stream(kind, error, parts=(b"", b"a"), ready=True):
    """A stream that raises behind its parts."""

    async def app(scope, receive, send):
        _progress.get().is_ready = ready
        headers = [(b"Content-Type", kind)]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for part in parts:
            await send({"type": "http.response.body", "body": part, "more_body": True})
        raise error

    return app


def late(error):
    """As Starlette tells of an HTTPException behind a start."""
    told = RuntimeError("Caught handled exception, but response already started.")
    told.__cause__ = error
    return told


def test_exceptions_behind_the_scheduler_are_500s_in_json():
    """Red if the layer swallows a fault of the server, or tells of it as text."""

    async def app(scope, receive, send):
        _progress.get().is_ready = True
        raise AttributeError("x")

    status, body, is_whole = answer_of(app, AttributeError)
    assert status == 500 and is_whole
    assert json.loads(body)["message"].endswith("request (AttributeError).")


@pytest.mark.parametrize("ready", [True, False])
def test_streams_without_a_byte_get_a_status(ready):
    """Red if an error before the first byte breaks a stream off."""
    app = stream(b"text/event-stream", ValueError("too long"), (b"",), ready)
    status, body, is_whole = answer_of(app)
    assert status == 400 and is_whole
    assert json.loads(body)["message"] == "too long"


@pytest.mark.parametrize("error", [HTTPException(503, "full"), ValueError("full")])
def test_the_schedulers_own_errors_keep_their_status(error):
    """Red if HTTP 503 of the scheduler becomes 500 in a stream."""
    app = stream(b"application/x-ndjson", late(error), ())
    status, body, _ = answer_of(app)
    assert status == getattr(error, "status_code", 400)
    assert json.loads(body)["message"] == "full"


def test_streams_that_have_begun_end_with_an_error():
    """Red if a stream breaks off in its middle."""
    app = stream(b"application/x-ndjson", ValueError("full"))
    assert answer_of(app) == (200, b'a{"error":"full"}\n', True)
    app = stream(b"text/event-stream; charset=utf-8", KeyError("x"))
    status, body, is_whole = answer_of(app, KeyError)
    assert status == 200 and is_whole and body.startswith(b"adata: ")
    assert json.loads(body[7:])["error"]["code"] == 500
