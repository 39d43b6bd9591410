"""Errors before the scheduler has a request are HTTP 400, later ones are not."""

import asyncio
import contextlib
import json
from types import SimpleNamespace

import pytest
from fastapi import HTTPException

from benchmarks.models import OTHER_DRAFT_PATH
from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from sglang_parse.shield import guards
from sglang_parse.shield.faults import GRAMMAR_FAILED
from sglang_parse.shield.guards import RequestShield, _progress
from sglang_parse.shield.seams import SHIELD_ENV, is_shielded
from tests.unit.shield.test_faults import VOCAB, tokenized


@pytest.fixture(autouse=True)
def shield(monkeypatch):
    monkeypatch.setenv(SHIELD_ENV, "1")


def manager():
    return SimpleNamespace(
        server_args=SimpleNamespace(speculative_algorithm=None),
        model_config=SimpleNamespace(vocab_size=VOCAB),
    )


def raises(error):
    def original(*args):
        raise error

    return original


@pytest.mark.parametrize(
    ("switch", "algorithm", "expected"),
    [
        *((None, "PARSE", True), (None, "parse", True), (None, "EAGLE", False)),
        *((None, None, False), ("1", None, True), ("0", "PARSE", False)),
    ],
)
@pytest.mark.usefixtures("plugins")
def test_parse_servers_and_those_that_ask_are_shielded(
    monkeypatch, switch, algorithm, expected
):
    """Red if a stock server is shielded that did not ask for it, or the other way."""
    monkeypatch.delenv(SHIELD_ENV)
    if switch is not None:
        monkeypatch.setenv(SHIELD_ENV, switch)
    assert is_shielded(SimpleNamespace(speculative_algorithm=algorithm)) == expected


def test_other_servers_are_left_alone(monkeypatch):
    """Red if the hooks change a request of a server without the shield."""
    monkeypatch.setenv(SHIELD_ENV, "0")
    one, empty, outputs = manager(), tokenized([]), object()
    assert guards.check_ready(lambda m, obj: empty, one, None) is empty
    with pytest.raises(KeyError):
        guards.check_ready(raises(KeyError("x")), one, None)
    assert guards.guard_outputs(outputs, one, None) is outputs


def test_what_sglang_raises_on_fields_is_a_value_error():
    """Red if a broken stop_regex is HTTP 500 in a stream."""
    with pytest.raises(ValueError, match=r"cannot be read \(TypeError: 'no'\)"):
        guards.check_ready(raises(TypeError("no")), manager(), None)


async def _outputs(error, ready):
    if ready:
        guards.check_ready(lambda m: tokenized(), manager())
    if error:
        raise error
    yield 1


@pytest.mark.parametrize(("ready", "kind"), [(False, ValueError), (True, RuntimeError)])
def test_only_errors_before_the_scheduler_are_the_requests(ready, kind):
    """Red if a server's fault is told as the request's, or the other way round."""

    async def run():
        outputs = _outputs(RuntimeError("x"), ready)
        return [x async for x in guards.guard_outputs(outputs, manager(), None)]

    with pytest.raises(kind):
        asyncio.run(run())


@pytest.mark.parametrize("params", [{"n": 2**31}, [{}, {"n": 5000}]])
def test_more_answers_than_there_is_memory_for_are_refused(params):
    """Red if SGLang copies a request two thousand million times."""
    obj = SimpleNamespace(sampling_params=params)
    outputs = guards.guard_outputs(_outputs(None, True), manager(), obj)
    with pytest.raises(ValueError, match=r"^n is \d+; expected at most 512"):
        asyncio.run(outputs.__anext__())


def grammar_failed(stream):
    """What a request gets whose grammar allows no token (tokenizer_manager.py)."""
    told = f"{GRAMMAR_FAILED}: x"

    async def outputs():
        if not stream:
            raise HTTPException(500, told)
        reason = {"type": "abort", "message": told, "status_code": 500}
        yield {"meta_info": {"finish_reason": reason}}

    return outputs()


def test_a_grammar_that_allows_no_token_is_the_requests_fault():
    """Red if such a request is answered with HTTP 500, at once or in a stream."""
    with pytest.raises(ValueError, match="^The grammar .* allows no token"):
        asyncio.run(guards.Guarded(grammar_failed(False)).__anext__())
    output = asyncio.run(guards.Guarded(grammar_failed(True)).__anext__())
    reason = output["meta_info"]["finish_reason"]
    assert reason["status_code"] == 400 and "allows no token" in reason["message"]


def respond(status, body):
    async def app(scope, receive, send):
        await receive()
        start = {"type": "http.response.start", "status": status, "headers": []}
        await send(start)
        await send({"type": "http.response.body", "body": body, "more_body": False})

    return app


def answer_of(app, error=None, path="/generate", asked=b"{}"):
    """(status, body, whether it is whole) of one POST, and what came through."""
    sent = []

    async def receive():
        return {"type": "http.request", "body": asked, "more_body": False}

    async def send(message):
        sent.append(message)

    with pytest.raises(error) if error else contextlib.nullcontext():
        layer = RequestShield(app, str(TARGET_PATH))
        asyncio.run(layer({"type": "http", "path": path}, receive, send))
    is_whole = not sent[-1].get("more_body", False)
    return sent[0]["status"], b"".join(m.get("body", b"") for m in sent[1:]), is_whole


def call(app, body=b"{}", path="/generate"):
    """(status, body) of one POST through the layer."""
    return answer_of(app, None, path, body)[:2]


def test_early_500s_become_400s():
    """Red if an error of the OpenAI handlers stays HTTP 500."""
    status, _ = call(respond(501, b'{"message": "It does not stream."}'))
    assert status == 400
    status, body = call(respond(500, b'{"message": "Internal server error: no rid"}'))
    assert status == 400 and "no rid" in json.loads(body)["message"]
    assert call(respond(500, b"oops"), path="/server_info") == (500, b"oops")


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/decisions", "/v1/systemone"])
@pytest.mark.parametrize("more", [b"", b', "x": NaN', b', "x": "\\ud800"'])
def test_a_chat_template_of_a_request_is_not_run(path, more):
    """Red if a template that never ends freezes the server where SGLang renders a chat
    without asking whether it trusts one."""
    options = b'{"chat_template_kwargs": {"chat\\u005ftemplate": "{{ 1 }}"}%s}' % more
    status, body = call(respond(200, b"ran"), options, path)
    assert status == 400
    assert "--trust-request-chat-template" in json.loads(body)["message"]
    plain = b'{"chat_template_kwargs": {"enable_thinking": false}}'
    for asked in (plain, b"{}", b"[]", b"{", b'{"chat_template_kwargs": null}'):
        assert call(respond(200, b"ran"), asked, path) == (200, b"ran")


def test_500s_behind_the_scheduler_stay():
    """Red if a fault of the server is told as the request's."""

    async def app(*args):
        _progress.get().is_ready = True
        await respond(500, b"fault")(*args)

    assert call(app) == (500, b"fault")


@pytest.mark.parametrize("body", [b"{}", b" null"])
def test_exceptions_become_400s(body):
    """Red if a body that is no object, or Ollama's options, end in HTTP 500."""

    async def app(scope, receive, send):
        await receive()
        raise AttributeError("x")

    status, answer = call(app, body)
    assert status == 400 and "AttributeError" in json.loads(answer)["message"]


def test_weights_of_an_unknown_format_are_refused():
    """Red if the scheduler is asked to read them, or a body loses a part on its way."""

    async def app(scope, receive, send):
        await respond(200, (await receive())["body"])(scope, receive, send)

    path = "/update_weights_from_disk"
    fine = b'{"model_path": "x", "load_format": "auto"}'
    assert call(app, fine, path) == (200, fine)
    status, body = call(app, fine.replace(b"auto", b"zzz"), path)
    assert status == 400 and "load_format is 'zzz'" in json.loads(body)["message"]


def test_weights_that_do_not_fit_are_refused(tmp_path):
    """Red if the scheduler is asked to load them, which ends it."""
    whole = next(TARGET_PATH.glob("*.safetensors")).read_bytes()
    (tmp_path / "cut.safetensors").write_bytes(whole[:-8])
    path = "/update_weights_from_disk"
    for folder, told in (
        (TARGET_PATH, ""),
        (tmp_path / "none", ""),  # SGLang answers
        (DRAFT_PATH, "198 tensors are missing"),
        (OTHER_DRAFT_PATH, "has the shape"),
        (tmp_path, "cut.safetensors cannot be read"),
    ):
        body = json.dumps({"model_path": str(folder)}).encode()
        status, found = call(respond(200, b"{}"), body, path)
        assert status == (400 if told else 200)
        assert told in json.loads(found).get("message", "")


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
