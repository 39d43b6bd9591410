"""`sglang-parse trace`: what it sends and shows."""

import io
import json
import re
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest
from rich.console import Console

from sglang_parse.cli import main as cli
from sglang_parse.cli import trace
from sglang_parse.cli.trace import Trace, TraceOptions

QUESTION = "Is 1 < 2 & \"so\" on? <script>alert('q')</script>"
ANSWER = "Yes, <b>1</b>\nis & stays\n less."


def segment(origin, outcome, text_start, text, score=None, start=0):
    return {
        "origin": origin,
        "outcome": outcome,
        "start": start,
        "token_ids": [1, 2],
        "text_start": text_start,
        "text": text,
        "score": score,
    }


REPORT = {
    "mode": "semantic",
    "target_passes": 2,
    "draft_tokens": 9,
    "kept_tokens": 4,
    "written_tokens": 2,
    "segments": [
        segment("draft", "kept", 3, ", <b>1</b>\n", 0.98765),
        segment("draft", "rejected", 14, "isn't</s></span>\n", 0.01234),
        segment("client", "kept", 14, "is & stays\n", 0.75),
        segment("target", "written", 25, " less."),
    ],
}


# -- The command ----------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """Answers every POST with what the test put on the server."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.asked = (self.path, dict(self.headers), json.loads(body))
        status, reply = self.server.reply
        self.send_response(status)
        self.end_headers()
        self.wfile.write(json.dumps(reply).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def server():
    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        server.url = f"http://127.0.0.1:{server.server_port}"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server
        server.shutdown()


def completion(meta_info):
    choice = {"message": {"content": ANSWER}, "meta_info": meta_info}
    return 200, {"model": "tiny", "choices": [choice]}


def test_trace_asks_and_draws(server, tmp_path, capsys):
    """Red if an option of the request is lost, or a part of the answer."""
    server.reply = completion({"parse": [{**REPORT, "fallback": "x\x1b[2Jy"}]})
    draft = tmp_path / "draft.txt"
    draft.write_text("Yes,\n")
    argv = ["trace", QUESTION, "--url", server.url + "/v1/"]
    argv += ["--draft", str(draft), "--threshold", "0.7", "--mode", "semantic"]
    assert cli.main([*argv, "--api-key", "secret"]) == 0
    path, headers, body = server.asked
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert body["messages"] == [{"role": "user", "content": QUESTION}]
    assert body["return_meta_info"] is True and body["separate_reasoning"] is False
    assert body["custom_params"] == {
        "parse_threshold": 0.7,
        "parse_mode": "semantic",
        "parse_draft": "Yes,\n",
        "parse_report": True,
    }
    out = capsys.readouterr().out
    assert "x isn't</s></span> [0.01]" in out
    assert "mode semantic because of x\ufffd[2Jy, 2 target passes, 9 tokens" in out


def test_terminal_colours_follow_the_origin():
    """Red if draft, client and target text look alike on a terminal."""
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="standard", width=100
    )
    trace.show(Trace(QUESTION, ANSWER, REPORT), console)
    out = console.file.getvalue()
    for colour, words in (("32", "<b>1</b>"), ("35", "is & stays"), ("33", " less.")):
        assert re.search(rf"\x1b\[[0-9;]*{colour}m[^\x1b]*{re.escape(words)}", out)
    assert re.search(r"\x1b\[9;31misn't", out)


def test_fallback_is_told():
    report = {**REPORT, "mode": "exact", "fallback": "grammar"}
    assert trace.summary(report).startswith("mode exact because of grammar, 2 target")


def test_why_rounds_were_not_judged_is_told():
    """Red if a trace without verdicts does not say why there are none."""
    why = "verdicts do not pay here: 1.3x against 1.6x"
    report = {"mode": "semantic", "not_judged": {"rounds": 3, "reason": why}}
    assert trace.summary(report) == f"mode semantic. 3 rounds not judged: {why}."
    assert "not judged" not in trace.summary({"mode": "semantic"})


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (completion({"parse": [{"segments": [{"text": "a"}]}]}), "lacks 'text_start'"),
        (completion({"id": "x"}), "does not serve PARSE; start the server with"),
        (completion(None), "does not serve PARSE; start the server with"),
        ((400, {"error": {"message": "parse_mode is\n'x'"}}), "400: parse_mode is 'x'"),
        ((404, {"detail": "Not Found"}), '404: {"detail": "Not Found"}'),
    ],
)
def test_useless_replies_are_one_sentence(server, capsys, reply, message):
    server.reply = reply
    assert cli.main(["trace", "Q", "--url", server.url]) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_no_server_is_one_sentence(capsys):
    assert cli.main(["trace", "Q", "--url", "http://127.0.0.1:9"]) == 1
    error = capsys.readouterr().err
    assert "does not answer" in error and "--url" in error
    assert len(error.splitlines()) == 1


def test_trace_refuses_before_it_asks(monkeypatch, capsys):
    monkeypatch.setattr(trace, "ask", lambda _: pytest.fail("asked"))
    assert cli.main(["trace", " "]) == 1
    assert "prompt is empty" in capsys.readouterr().err


def test_prompt_comes_from_standard_input(monkeypatch):
    seen = []
    monkeypatch.setattr(trace, "run_trace", seen.append)
    monkeypatch.setattr("sys.stdin", io.StringIO("From a file?"))
    assert cli.main(["trace", "-"]) == 0
    assert seen == [TraceOptions("http://127.0.0.1:30000", "From a file?")]
