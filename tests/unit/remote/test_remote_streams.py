"""Streams of a remote server that is slow, wrong, or gone: a real one on loopback."""

from __future__ import annotations

import json
import logging
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from sglang_parse.options.validation import DRAFT_KEY_ENV
from sglang_parse.remote import remote_streams
from sglang_parse.remote.breaker import MAX_FAILURES, REST_S, Breaker
from sglang_parse.remote.remote_protocol import (
    RemoteError,
    check_key,
    read_event,
)
from sglang_parse.remote.remote_streams import (
    MAX_TEXT,
    RemoteStreams,
)

KEY = "sk-never-shown"


def event(text: str, reason: str | None = None) -> bytes:
    body = {"choices": [{"text": text, "finish_reason": reason}]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


class Fake:
    """A draft server; `answer` writes the body of each completion. owner: of its
    models."""

    def __init__(self, answer, status: int = 200, headers=(), owner: str = "") -> None:
        self.bodies: list[dict] = []
        self.keys: list[str | None] = []
        self.gone = threading.Event()
        fake = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args) -> None: ...

            def do_GET(self) -> None:
                self.send_response(200)
                self.end_headers()
                models = [{"id": "small", "owned_by": owner}]
                self.wfile.write(json.dumps({"data": models}).encode())

            def do_POST(self) -> None:
                size = int(self.headers["content-length"])
                fake.bodies.append(json.loads(self.rfile.read(size)))
                fake.keys.append(self.headers["authorization"])
                self.send_response(status)
                for name, value in headers:
                    self.send_header(name, value)
                self.end_headers()
                try:
                    for part in answer(fake.bodies[-1]):
                        self.wfile.write(part)
                        self.wfile.flush()
                except OSError:
                    fake.gone.set()

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        serve = self.server.serve_forever
        threading.Thread(target=serve, args=(0.02,), daemon=True).start()


@pytest.fixture
def serve():
    """Starts a fake server and its streams; both end with the test."""
    made = []

    def start(answer, *, status=200, headers=(), url=None, owner="", **settings):
        fake = Fake(answer, status, headers, owner)
        streams = RemoteStreams(url or fake.url, **settings)
        made.append((fake, streams))
        return fake, streams

    yield start
    for fake, streams in made:
        streams.close()
        fake.server.shutdown()
        fake.server.server_close()


def done(stream, seconds=10.0):
    end = time.monotonic() + seconds
    while not stream.is_done:
        assert time.monotonic() < end
        time.sleep(0.005)
    return stream


def test_a_stream_reads_to_the_end(serve):
    """Red if text is lost, the end is not seen, or the key does not arrive."""

    def answer(body):
        yield b": a comment\n\n"
        whole = event("Grüße ") + event("an ") + event("alle", "stop") + b"data: [DONE]"
        for k in range(0, len(whole), 7):
            yield whole[k : k + 7]

    fake, streams = serve(answer, key=KEY)
    stream = done(streams.begin("Once", 50))
    assert stream.text.decode() == "Grüße an alle"
    assert stream.has_ended and not stream.has_failed and streams.is_up
    assert fake.bodies[0]["prompt"] == "Once" and fake.bodies[0]["max_tokens"] == 50
    assert fake.bodies[0]["model"] == "small"
    assert fake.keys == [f"Bearer {KEY}"]


def short(body):
    yield event("so", "stop")


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_text_that_is_refused_is_not_the_servers_failure(serve, status):
    """Red if clients' over-long texts have the server left alone."""
    _, streams = serve(short, status=status)
    for _ in range(MAX_FAILURES + 1):
        stream = done(streams.begin("text", 5))
        assert stream.has_failed and stream.is_refused
    assert streams.is_up and not streams.breaker.is_failing


@pytest.mark.parametrize("key", ["sk-é", "a\r\nb", "a\n", "two words", "\x7f"])
def test_a_key_that_no_header_holds_ends_the_start(key):
    """Red if the thread of the streams dies of it, or the message shows the key."""
    with pytest.raises(ValueError, match=DRAFT_KEY_ENV) as found:
        check_key(key)
    assert key not in str(found.value) and "\n" not in str(found.value)
    check_key(KEY)
    check_key("")


def test_a_named_model_needs_no_list(serve):
    """Red if a hosted server without a list of models cannot draft."""
    fake, streams = serve(short, model="named", owner="x" * 100_000)
    assert done(streams.begin("text", 5)).text == b"so"
    assert fake.bodies[0]["model"] == "named"


def test_what_has_come_can_be_read_before_the_end(serve):
    """Red if a slow server's text is kept back until its stream is done."""
    go = threading.Event()

    def answer(body):
        yield event("first")
        go.wait(10)
        yield event(" second", "length")

    _, streams = serve(answer, model="named")
    stream = streams.begin("p", 5)
    end = time.monotonic() + 10
    while not stream.text and time.monotonic() < end:
        time.sleep(0.005)
    assert stream.text == b"first" and not stream.is_done
    go.set()
    assert done(stream).text == b"first second" and not stream.has_ended


def endless(body):
    while True:
        yield event("words " * 50)


def long_line(body):
    yield b"data: " + b"x" * 10_000_000


def long_event(body):
    yield event("x" * 10_000_000, "stop")


def nonsense(body):
    yield b'data: {"choices": 5}\n\n'


def nested(body):
    yield b"data: " + b"[" * 60_000 + b"\n\n"


def broken_off(body):
    yield event("one")


def test_an_endless_stream_is_left(serve):
    """Red if a server can fill the memory, or hold a connection for ever."""
    fake, streams = serve(endless)
    stream = done(streams.begin("p", 5))
    assert len(stream.text) == MAX_TEXT and not stream.has_failed
    assert fake.gone.wait(10)


def letters(body):
    while True:
        yield event("x") * 50


def single_bytes(body):
    while True:
        for byte in event("x" * 9):
            yield bytes([byte])


def padded(body):
    while True:
        yield event("x")[:-3] + b', "more": "' + b"x" * 60_000 + b'"}\n\n'


@pytest.mark.parametrize("answer", [letters, single_bytes, padded])
def test_a_stream_of_crumbs_is_left(serve, answer):
    """Red if a server that sends far more than tokens keeps a core busy."""
    fake, streams = serve(answer)
    stream = done(streams.begin("p", 50))
    assert 0 < len(stream.text) < MAX_TEXT // 2 and not stream.has_failed
    assert fake.gone.wait(10) and streams.is_up


def empty_lines(body):
    while True:
        yield b"\n" * 1000


def empty_events(body):
    while True:
        yield event("") * 100


@pytest.mark.parametrize(
    "answer",
    [
        *(long_line, long_event, nonsense, nested, broken_off),
        *(empty_lines, empty_events),
    ],
)
def test_a_stream_that_breaks_the_rules_fails(serve, answer):
    """Red if 10 MB in a line are read, or nonsense ends the thread of the streams."""
    _, streams = serve(answer)
    for _ in range(2):
        stream = done(streams.begin("p", 5))
        assert stream.has_failed and len(stream.text) <= 3


@pytest.mark.parametrize(
    ("status", "headers"), [(500, ()), (401, ()), (200, [("content-encoding", "gzip")])]
)
def test_what_is_no_stream_fails(serve, status, headers):
    """Red if an error page is drafted, or a compressed reply is unpacked."""
    _, streams = serve(
        lambda body: [event("x", "stop")], status=status, headers=headers
    )
    assert done(streams.begin("p", 5)).has_failed


def test_a_server_that_fails_is_left_alone(serve, caplog):
    """Red if each round knocks at a server that is gone, if the key or a reply is in
    the log, or if nobody tries again."""
    now = [0.0]
    events = []
    _, streams = serve(
        nonsense, url="http://127.0.0.1:9/v1", key=KEY, count=events.append,
        breaker=Breaker(lambda: now[0]),
    )  # fmt: skip
    with caplog.at_level(logging.DEBUG):
        for _ in range(MAX_FAILURES):
            assert done(streams.begin("secret prompt", 5)).has_failed
        assert not streams.is_up and streams.begin("p", 5) is None
        now[0] += REST_S
        assert streams.is_up
        # One at a time is tried now.
        assert done(streams.begin("p", 5)).has_failed
        now[0] += REST_S
        assert not streams.is_up  # the rest grows
    assert events.count("begun") == events.count("failed") == MAX_FAILURES + 1
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("sglang_parse")]
    assert len(ours) == 2 and "ConnectError" in ours[0]
    assert not any(
        KEY in r.getMessage() or "secret" in r.getMessage() for r in caplog.records
    )


def test_a_server_without_a_word_is_given_up(serve, monkeypatch):
    """Red if a connection that says nothing, or only that it lives, is kept."""
    monkeypatch.setattr(remote_streams, "FIRST_TEXT_S", 0.3)
    stop = threading.Event()

    def answer(body):
        while not stop.wait(0.05):
            yield b": still here\n\n"

    _, streams = serve(answer)
    assert done(streams.begin("p", 5)).has_failed
    stop.set()


def test_streams_are_bounded_and_can_be_ended(serve):
    """Red if requests beyond the bound are sent, or a stream nobody wants goes on."""
    stop = threading.Event()

    def answer(body):
        while not stop.wait(0.02):
            yield event("a")

    _, streams = serve(answer, most=2)
    first, second = streams.begin("p", 5), streams.begin("q", 5)
    assert streams.begin("r", 5) is None
    streams.end(first)
    done(first)
    third = streams.begin("r", 5)
    assert third is not None and not second.is_done
    streams.end(third)  # before it has begun
    done(third)
    stop.set()


def test_events_are_read_as_servers_write_them():
    """Red if a dialect of the stream is refused, or a lone surrogate raises."""
    assert read_event(b"") == read_event(b": ping") == (b"", "", False)
    assert read_event(b'data:{"choices": []}') == (b"", "", False)
    assert read_event(b"data: [DONE]\r") == (b"", "", True)
    assert read_event(event("\ud800x")[:-2])[0] == b"?x"
    for bad in (b"data: 1", b"data: {}", b'data: {"choices": [1]}', b"data: {"):
        with pytest.raises(RemoteError):
            read_event(bad)
