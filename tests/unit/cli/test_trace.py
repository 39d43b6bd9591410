"""`sglang-parse trace`: what it sends, and how it draws an answer."""

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from sglang_parse.cli import main as cli
from sglang_parse.cli import trace
from sglang_parse.cli.trace import TraceOptions
from sglang_parse.cli.trace_text import answer_spans, draw_answer, most_telling
from sglang_parse.demo.figures import RequestResult

ANSWER = "Step 1: a.\nSo c.\n!"


def segment(origin, outcome, text_start, text, score=None):
    return {
        "origin": origin,
        "outcome": outcome,
        "text_start": text_start,
        "text": text,
        "score": score,
    }


REPORT = {
    "mode": "semantic",
    "target_passes": 2,
    "draft_tokens": 9,
    "segments": [
        segment("client", "kept", 4, " 1:", 0.9),
        segment("draft", "kept", 7, " a.\n", 0.8),
        segment("draft", "rejected", 11, "So b.", 0.1),
        segment("draft", "rejected", 11, " Bad.", 0.2),
        segment("draft", "kept", 11, "So"),
        segment("target", "written", 13, " c.\n"),
    ],
}


# -- The drawing ----------------------------------------------------------------------


def test_spans_hold_the_whole_answer_once_in_order():
    """Red if output is lost, or what was rejected appears in it."""
    spans = answer_spans(ANSWER, REPORT)
    assert "".join(s.text for s in spans if s.kind != "rejected") == ANSWER
    assert [s.kind for s in spans] == [
        *("written", "client", "kept", "rejected", "agreed", "written", "written")
    ]
    assert spans[3].text == "So b." and spans[3].num_later == 1
    assert [s.kind for s in answer_spans("abc", {})] == ["written"]
    assert answer_spans("", {}) == []


@pytest.mark.parametrize("raw", [*"\x00\x07\x1b\r\x9b\u202a\u202e\u2066\u2069\ud800"])
def test_controls_do_not_reach_the_terminal(raw):
    """Red if an answer can clear the screen, change the title or turn text around."""
    spans = answer_spans(f"a{raw}b\tc\n", {})
    assert [s.text for s in spans] == ["a\ufffdb\tc\n"]
    rejected = segment("draft", "rejected", 0, f"a{raw}", 0.1)
    drawn = draw_answer(answer_spans("", {"segments": [rejected]})).plain
    assert drawn == "x a\ufffd [0.10]\n"


@pytest.mark.parametrize("field", ["text_start", "text", "outcome", "score", "origin"])
def test_a_segment_without_a_field_is_one_sentence(field):
    """Red if the report of another version ends in a KeyError."""
    one = {k: v for k, v in REPORT["segments"][0].items() if k != field}
    with pytest.raises(ValueError, match=f"lacks '{field}'; expected a report"):
        answer_spans(ANSWER, {"segments": [one]})


def test_drawing_strikes_the_rejected_above_its_replacement():
    """Red if what was rejected cannot be told from the answer, or has another place."""
    drawing = draw_answer(answer_spans(ANSWER, REPORT), marks=True)
    assert drawing.plain.splitlines() == [
        "  «Step» 1: [0.90] a. [0.80]",
        "x So b. [0.10, 1 later dropped]",
        "  So« c.»",
        "  «!»",
    ]
    struck = [s for s in drawing.spans if "strike" in str(s.style)]
    assert [drawing.plain[s.start : s.end] for s in struck] == ["So b."]
    styles = {drawing.plain[s.start : s.end]: str(s.style) for s in drawing.spans}
    assert (styles[" [0.90]"], styles[" [0.80]"]) == ("dim", "dim yellow")


def test_a_probes_verdict_is_told_from_the_questions():
    """Red if a trace does not show what gave a verdict."""
    asked, read = (
        segment("draft", "kept", at, "a\n", 0.8) | {"judge": judge}
        for at, judge in ((0, "suffix"), (2, "probe"))
    )
    drawn = draw_answer(answer_spans("a\na\n", {"segments": [asked, read]})).plain
    assert drawn.splitlines() == ["  a [0.80]", "  a [0.80 by the probe]"]


def test_summary_tells_why_a_request_was_served_otherwise():
    """Red if a trace without verdicts does not say why there are none."""
    report = {**REPORT, "mode": "exact", "fallback": "grammar"}
    assert trace.summary(report).startswith("mode exact because of grammar, 2 target")
    why = "verdicts do not pay here: 1.3x against 1.6x"
    report = {"mode": "semantic", "not_judged": {"rounds": 3, "reason": why}}
    assert trace.summary(report) == f"mode semantic. 3 rounds not judged: {why}."
    assert "not judged" not in trace.summary({"mode": "semantic"})


def make_result(judged, kept, *, correct=True):
    report = {"judged_segments": judged, "kept_segments": kept}
    return RequestResult("", (1, 2), 2, correct, 1.0, 0.5, report)


def test_most_telling_answer_is_right_and_has_a_rejection():
    """Red if the demo draws an answer in which nothing was rejected, or a wrong one."""
    results = [make_result(3, 3), make_result(3, 1, correct=False), make_result(3, 1)]
    assert most_telling(results) == 2
    assert most_telling(results[:2]) == 0


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
        serve = server.serve_forever
        threading.Thread(target=serve, args=(0.02,), daemon=True).start()
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
    argv = ["trace", "Q", "--url", server.url + "/v1/", "--api-key", "secret"]
    argv += ["--draft", str(draft), "--threshold", "0.7", "--mode", "semantic"]
    assert cli.main(argv) == 0
    path, headers, body = server.asked
    assert path == "/v1/chat/completions"
    assert headers["Authorization"] == "Bearer secret"
    assert body["messages"] == [{"role": "user", "content": "Q"}]
    assert body["return_meta_info"] is True and body["separate_reasoning"] is False
    assert body["custom_params"] == {
        "parse_threshold": 0.7,
        "parse_mode": "semantic",
        "parse_draft": "Yes,\n",
        "parse_report": True,
    }
    out = capsys.readouterr().out
    assert "x So b. [0.10, 1 later dropped]" in out
    assert "mode semantic because of x\ufffd[2Jy, 2 target passes, 9 tokens" in out


@pytest.mark.parametrize(
    ("reply", "message"),
    [
        (completion({"parse": [{"segments": [{"text": "a"}]}]}), "lacks 'text_start'"),
        (completion({"id": "x"}), "does not serve PARSE; start the server with"),
        (completion(None), "does not serve PARSE; start the server with"),
        ((400, {"error": {"message": "parse_mode is\n'x'"}}), "400: parse_mode is 'x'"),
        ((404, {"detail": "Not Found"}), '404: {"detail": "Not Found"}'),
        (None, "does not answer ("),
    ],
)
def test_useless_replies_are_one_sentence(server, capsys, reply, message):
    """Red if a wrong address, or a server without PARSE, gives a traceback."""
    server.reply = reply
    url = server.url if reply else "http://127.0.0.1:9"
    assert cli.main(["trace", "Q", "--url", url]) == 1
    error = capsys.readouterr().err
    assert message in error
    assert len(error.splitlines()) == 1


def test_the_prompt_may_come_from_standard_input(monkeypatch, capsys):
    """Red if `-` is taken for the question, or an empty one is sent."""
    seen = []
    monkeypatch.setattr(trace, "run_trace", seen.append)
    monkeypatch.setattr("sys.stdin", io.StringIO("From a file?"))
    assert cli.main(["trace", "-"]) == 0
    assert seen == [TraceOptions("http://127.0.0.1:30000", "From a file?")]
    assert cli.main(["trace", " "]) == 1
    assert "prompt is empty" in capsys.readouterr().err and len(seen) == 1
