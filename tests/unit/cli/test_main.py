"""The console script: arguments, output, and the demo's pure parts."""

import io
import json
import shlex
import signal

import pytest
from rich.console import Console

from sglang_parse.cli import demo_run as demo
from sglang_parse.cli import main as cli
from sglang_parse.demo.figures import RequestResult, summarise
from sglang_parse.embedded import (
    DRAFT_HEAD_PATH,
    DRAFT_PATH,
    HEAD_PATH,
    QUESTION,
    TARGET_PATH,
)
from sglang_parse.embedded.task import Problem
from sglang_parse.options.server import ParseConfig


def make_result(report=None, **changes):
    fields = {"text": "", "token_ids": (1, 2), "num_tokens": 2, "correct": True}
    times = {"latency_s": 1.0, "ttft_s": 0.5}
    return RequestResult(**{**fields, **times, **changes}, report=report)


def test_models_prints_where_the_pair_and_its_head_lie(capsys):
    """Red if a script that reads `target PATH` line by line breaks."""
    assert cli.main(["models"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[:5] == [
        f"target {TARGET_PATH}",
        f"draft {DRAFT_PATH}",
        f"head {HEAD_PATH}",
        f"draft_head {DRAFT_HEAD_PATH}",
        "",
    ]
    assert QUESTION in lines[-1]


@pytest.mark.parametrize(
    ("argv", "hint"),
    [
        (["demo", "--problms", "3"], "--problems"),
        (["trace", "--treshold", "1"], "--threshold"),
    ],
)
def test_a_misspelt_flag_is_told_what_is_meant(argv, hint, capsys):
    with pytest.raises(SystemExit):
        cli.main(argv)
    assert f"(did you mean {hint}?)" in capsys.readouterr().err


def test_the_embedded_pair_is_offered_a_question_of_its_task():
    """Red if a first question is one that the pair has not learnt."""
    events = (("buys", 3), ("sells", 8), ("finds", 3), ("drops", 1))
    assert Problem("Tom", "apples", 5, events).prompt == QUESTION


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
    console.print(*demo.results_tables(summaries))
    text = console.export_text()
    assert "…" not in text and "99.2-100.0%" in text


def test_manual_commands_are_shell_words_and_valid_json():
    options = demo.DemoOptions(target="/a b/t", draft="/d")
    server, curl = demo.manual_commands(options, 'It\'s "5"?')
    words = shlex.split(server)
    assert words[words.index("--model-path") + 1] == "/a b/t"
    assert words[words.index("--speculative-algorithm") + 1] == "PARSE"
    body = json.loads(shlex.split(curl)[-1])
    assert body["messages"][0]["content"] == 'It\'s "5"?'


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
