"""A draft server that misbehaves in many ways, in a process of its own."""

from __future__ import annotations

import json
import multiprocessing
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from multiprocessing.process import BaseProcess
from typing import Any

from sglang_parse.demo.servers import HOST

SLOW_S = 5.0
Answers = dict[str, str]


def event(text: str, reason: str | None = None) -> bytes:
    """One event of a completion's stream."""
    body = {"choices": [{"text": text, "finish_reason": reason}]}
    return b"data: " + json.dumps(body).encode() + b"\n\n"


# -- Ways to answer: (answers by prompt, prompt and answer so far) -> parts


def right(answers: Answers, asked: str) -> Iterator[bytes]:
    """What the target writes, at once."""
    prompt = next((p for p in answers if asked.startswith(p)), None)
    done = asked[len(prompt) :] if prompt is not None else ""
    answer = answers.get(prompt or "", "")
    if answer.startswith(done):
        yield from (event(answer[k : k + 4]) for k in range(len(done), len(answer), 4))
    yield event("", "stop")


def slow(answers: Answers, asked: str) -> Iterator[bytes]:
    """The same, 5 s a token."""
    for part in right(answers, asked):
        time.sleep(SLOW_S)
        yield part


def wrong(answers: Answers, asked: str) -> Iterator[bytes]:
    """The answer to another prompt, at once."""
    others = [p for p in answers if not asked.startswith(p)]
    text = answers[others[len(asked) % len(others)]]
    yield from (event(text[k : k + 4]) for k in range(0, len(text), 4))
    yield event("", "stop")


def endless(answers: Answers, asked: str) -> Iterator[bytes]:
    """Letters without an end, an event each."""
    while True:
        yield event("a") * 50


def empty(answers: Answers, asked: str) -> Iterator[bytes]:
    """Events without an end, and no text in them."""
    while True:
        yield event("") * 100


def huge(answers: Answers, asked: str) -> Iterator[bytes]:
    """A line of 10 MB."""
    yield b"data: " + b"x" * 10_000_000


def marked(answers: Answers, asked: str) -> Iterator[bytes]:
    """Control tokens as text, before an answer that is right."""
    yield event("<|im_end|>\n<|im_start|>system\n")
    yield from right(answers, asked)


def broken(answers: Answers, asked: str) -> Iterator[bytes]:
    """A stream that breaks off behind a few words."""
    for k, part in enumerate(right(answers, asked)):
        if k == 5:
            return
        yield part


CASES: dict[str, Callable[[Answers, str], Iterator[bytes]]] = {
    one.__name__: one
    for one in (right, slow, wrong, endless, empty, huge, marked, broken)
}


def serve(port: int, answers: Answers, case: Any, cpu: int | None) -> None:
    """A draft server. case: shared integer, the place of a case in CASES."""
    if cpu is not None:
        os.sched_setaffinity(0, {cpu})
    ways = list(CASES.values())

    class Handler(BaseHTTPRequestHandler):
        def log_message(self, *args: object) -> None:
            return None

        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(b'{"data": [{"id": "draft"}]}')

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            self.send_response(200)
            self.end_headers()
            try:
                for part in ways[case.value](answers, body["prompt"]):
                    self.wfile.write(part)
                    self.wfile.flush()
            except OSError:
                return  # nobody reads on

    server = ThreadingHTTPServer((HOST, port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, daemon=True).start()
    threading.Event().wait()


@contextmanager
def draft_server(
    port: int, answers: Answers, cpu: int | None
) -> Iterator[tuple[BaseProcess, Any]]:
    """Its process and its case, once it listens."""
    context = multiprocessing.get_context("spawn")
    case = context.Value("i", 0)
    process = context.Process(target=serve, args=(port, answers, case, cpu))
    process.start()
    try:
        while not is_listening(port):
            assert process.is_alive()
            time.sleep(0.05)
        yield process, case
    finally:
        process.kill()
        process.join()


def is_listening(port: int) -> bool:
    with socket.socket() as one:
        return one.connect_ex((HOST, port)) == 0
