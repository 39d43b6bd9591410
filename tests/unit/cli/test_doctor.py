"""`sglang-parse doctor`: what it tells of an installation and of a pair."""

import json
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from types import SimpleNamespace

import pytest

from sglang_parse.cli import doctor
from sglang_parse.cli import main as cli
from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from sglang_parse.options.validation import DRAFT_KEY_ENV


def test_the_embedded_pair_passes_here(plugins, capsys):
    """Red if doctor finds fault with the pair that the package ships, or leaves out one
    of the checks of a server's start."""
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 8 and all(line.startswith("ok       ") for line in lines)
    assert f"{TARGET_PATH} with {DRAFT_PATH} passes" in lines[4]
    assert "as token ids: tokenizers agree" in lines[5]
    assert "Yes=404 No=403: '<|im_end|>" in lines[6]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (None, "--speculative-draft-model-path '{draft}' is not a folder"),
        ({"tokenizer.json": None}, "lacks a tokenizer; complete it."),
        ({"config.json": {"max_position_embeddings": 64}}, "--context-length 64 or"),
    ],
)
def test_a_pair_that_cannot_start_has_the_servers_sentence(
    changes, message, plugins, tmp_path
):
    """Red if a start would fail, and doctor does not say so in the same words."""
    draft = tmp_path / "draft"
    if changes is not None:
        draft.mkdir()
        for file in DRAFT_PATH.iterdir():
            (draft / file.name).symlink_to(file)
        for name, more in changes.items():
            config = json.loads((draft / name).read_text()) | (more or {})
            (draft / name).unlink()
            if more:
                (draft / name).write_text(json.dumps(config))
            else:
                (draft / "tokenizer_config.json").unlink()
    findings = list(doctor.run_checks(str(TARGET_PATH), str(draft)))
    assert [f.ok for f in findings] == [True] * 4 + [False]
    assert message.format(draft=draft) in findings[-1].text


def test_doctor_goes_on_after_a_failed_check(monkeypatch, capsys):
    """Red if a broken installation ends it with a traceback, or with status 0."""

    def broken():
        raise ImportError("no torch\nhere")

    for name in ("versions", "plugin", "platform", "hooks"):
        monkeypatch.setattr(doctor, f"check_{name}", broken)
    monkeypatch.setattr(doctor, "check_start", lambda *_: "fine")
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["problem  ImportError: no torch here"] * 4 + ["ok       fine"]


def test_a_model_that_asks_for_a_repetition_penalty_is_told(tmp_path):
    """Red if chat requests go one token a pass, and nothing says why."""
    args = SimpleNamespace(model_path=str(tmp_path))
    assert "leave chat requests to PARSE" in doctor.check_sampling(args)
    path = tmp_path / "generation_config.json"
    path.write_text('{"repetition_penalty": 1.0, "top_p": 0.8}')
    assert "leave chat requests to PARSE" in doctor.check_sampling(args)
    path.write_text('{"repetition_penalty": 1.05}')
    with pytest.raises(ValueError, match=r"1.05: .* --sampling-defaults openai"):
        doctor.check_sampling(args)


class Listed(BaseHTTPRequestHandler):
    """A draft server that lists two models to who has the key."""

    def log_message(self, *args):
        """Nothing between the test's lines."""

    def do_GET(self):
        has_key = self.headers["authorization"] == "Bearer sk-hidden"
        self.send_response(200 if has_key else 401)
        self.end_headers()
        models = [{"id": "small", "owned_by": "us"}, {"id": "large", "owned_by": "us"}]
        self.wfile.write(json.dumps({"data": models}).encode())


def test_the_draft_server_lists_its_models(monkeypatch):
    """Red if a server that refuses, is gone, or has a password in its URL is not told
    of, or the key is shown."""
    monkeypatch.setenv(DRAFT_KEY_ENV, "sk-hidden")
    with ThreadingHTTPServer(("127.0.0.1", 0), Listed) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        found = doctor.check_draft_server(url)
        assert "asked with a key, serves small, large" in found
        monkeypatch.delenv(DRAFT_KEY_ENV)
        with pytest.raises(ValueError, match=r"cannot be used \(HTTP 401\); .*key"):
            doctor.check_draft_server(url)
        server.shutdown()
    monkeypatch.setenv(DRAFT_KEY_ENV, "sk-hidden")
    with pytest.raises(ValueError, match=r"cannot be used \(Connect") as caught:
        doctor.check_draft_server(url)
    assert "sk-hidden" not in str(caught.value)
    with pytest.raises(ValueError, match="draft-url"):
        doctor.check_draft_server("http://me:secret@host/v1")
