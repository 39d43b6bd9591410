"""Calibration: the choice on synthetic data, and the whole against a fake server."""

import json
import random
from dataclasses import replace

import pytest

from sglang_parse.calibrate import calibration
from sglang_parse.calibrate.calibrate_options import CalibrateOptions, problems_needed
from sglang_parse.calibrate.served import served_settings
from sglang_parse.calibrate.trials import (
    EXACT,
    OFF,
    Outcome,
    Setting,
    Trial,
    candidates,
    choose,
    compare,
)
from sglang_parse.cli import main as cli
from sglang_parse.options.server import ParseConfig
from tests.support.fake_sglang import CharTokenizer, FakeServer


def trial(threshold, *, lost=0, gained=0, problems=100, ratio=2.0, **fields):
    setting = Setting(threshold=threshold, **fields)
    right = [True] * problems
    base = Outcome(tuple(i >= gained for i in range(problems)), tuple([1.0] * problems))
    ours = [*right]
    for i in range(lost):
        ours[gained + i] = False
    seconds = tuple([1.0 / ratio] * problems)
    return compare(setting, Outcome(tuple(ours), seconds), base, 0.95)


def test_compare_counts_changes_against_the_target():
    t = trial(0.5, lost=3, gained=1, ratio=2.5)
    assert (t.lost, t.gained, t.loss) == (3, 1, 2)
    assert t.ratio == pytest.approx(2.5) and t.bound > 2


def test_candidates_go_from_cautious_to_bold_and_only_get_faster():
    screened = [
        trial(0.3, ratio=4.0),
        trial(0.5, ratio=3.0),
        trial(0.5, ratio=3.5, segmenter="fixed:32"),
        trial(0.7, ratio=3.2),
        trial(0.9, ratio=3.3),
        trial(0.97, ratio=1.2),
    ]
    order = candidates(screened, budget=0.5, confidence=0.95, exact_ratio=1.5)
    # 0.97 is slower than exact mode, 0.7 slower than the more cautious 0.9.
    assert [(s.threshold, s.segmenter) for s in order] == [
        (0.9, None),
        (0.5, "fixed:32"),
        (0.3, None),
    ]


def test_what_lost_in_screening_comes_behind_what_did_not():
    """Red if a setting that is more likely to fail the test is tested first: those
    behind a failure are not tried."""
    screened = [
        trial(0.9, lost=1, ratio=3.0),
        trial(0.9, ratio=2.0, segmenter="fixed:32"),
        trial(0.5, ratio=2.5),
        trial(0.3, gained=1, ratio=2.6),
    ]
    order = candidates(screened, budget=0.5, confidence=0.95, exact_ratio=1.5)
    assert [(s.threshold, s.segmenter) for s in order] == [
        (0.9, "fixed:32"),
        (0.5, None),
        (0.3, None),
        (0.9, None),
    ]


def test_what_is_slower_than_the_target_alone_is_no_candidate_and_no_choice():
    """Red if calibration slows a server down."""
    screened = [trial(0.9, ratio=0.95)]
    assert not candidates(screened, budget=0.5, confidence=0.95, exact_ratio=0.8)
    floor = Trial(EXACT, 100, 0.9, 0.0, 0.0, 0, 0, 0.8)
    best, tests = choose([], lambda s: floor, budget=0.5, floor=floor)
    assert best.setting == OFF and not tests
    assert (best.ratio, best.accuracy, best.problems) == (1, 0.9, 100)


def test_candidates_leave_out_what_screening_shows_to_lose():
    screened = [trial(0.1, lost=20, ratio=9.0), trial(0.9, lost=1, ratio=2.0)]
    order = candidates(screened, budget=0.5, confidence=0.95, exact_ratio=1.0)
    assert [s.threshold for s in order] == [0.9]


FLOOR = Trial(EXACT, 100, 1.0, 0.0, 0.0, 0, 0, 1.4)


def test_choice_is_the_last_that_passes_in_a_row():
    trials = {
        0.9: trial(0.9, problems=1000, ratio=2.0),
        0.7: trial(0.7, problems=1000, ratio=3.0),
        0.5: trial(0.5, problems=1000, lost=20, ratio=4.0),
        0.3: trial(0.3, problems=1000, ratio=5.0),
    }
    best, tests = choose(
        [t.setting for t in trials.values()],
        lambda s: trials[s.threshold],
        budget=0.5,
        floor=FLOOR,
    )
    assert best.setting.threshold == 0.7
    # 0.3 is not tried behind a failure: that is what keeps the confidence.
    assert [t.setting.threshold for t in tests] == [0.9, 0.7, 0.5]


def test_choice_falls_back_to_exact_mode():
    failing = trial(0.9, problems=1000, lost=9, ratio=2.0)
    best, _ = choose([failing.setting], lambda s: failing, budget=0.5, floor=FLOOR)
    assert best.setting == EXACT
    slow = trial(0.9, problems=1000, ratio=1.3)
    best, _ = choose([slow.setting], lambda s: slow, budget=0.5, floor=FLOOR)
    assert best.setting == EXACT


def test_choice_keeps_to_the_budget_as_often_as_it_claims():
    """Settings that lose 1% and 0.6% must pass a budget of 0.5 points at most one time
    in twenty."""
    rng = random.Random(5)
    wrong = 0
    for _ in range(200):

        def test(setting):
            loss = {0.9: 0.006, 0.5: 0.01}[setting.threshold]
            lost = sum(rng.random() < loss for _ in range(700))
            return trial(setting.threshold, problems=700, lost=lost)

        settings = [Setting(threshold=0.9), Setting(threshold=0.5)]
        best, _ = choose(settings, test, budget=0.5, floor=FLOOR)
        wrong += best.setting != EXACT
    assert wrong <= 20  # 10 expected at most; a coin this bad would say 42


def test_too_few_problems_are_refused_before_anything_is_asked(tmp_path, capsys):
    assert problems_needed(0.5, 0.95) == 598
    argv = ["calibrate", "--out", str(tmp_path / "x.json"), "--problems", "597"]
    assert cli.main(argv) == 1
    error = capsys.readouterr().err
    assert "give at least 598" in error and len(error.splitlines()) == 1


def test_settings_that_parse_does_not_know_are_refused(tmp_path):
    options = CalibrateOptions("http://x", tmp_path / "x", segmenters=("word",))
    with pytest.raises(ValueError, match="segmenter is 'word'"):
        options.settings()


def test_server_that_is_not_there_is_named(tmp_path, capsys):
    argv = ["calibrate", "--url", "http://127.0.0.1:9", "--out", str(tmp_path / "x")]
    assert cli.main(argv) == 1
    assert "no SGLang server answers there" in capsys.readouterr().err


@pytest.fixture
def server(monkeypatch):
    monkeypatch.setattr(calibration, "load_tokenizer", lambda path: CharTokenizer())
    ask = calibration.ask_setting

    def timed(options, setting, *rest):
        """What it is asked, with times of our own: the machine's are its own affair."""
        latency_s = 0.1 if setting.mode == "semantic" else 1.0
        return [replace(a, latency_s=latency_s) for a in ask(options, setting, *rest)]

    monkeypatch.setattr(calibration, "ask_setting", timed)
    with FakeServer("parse") as fake:
        yield fake


def run(server, out, *more):
    """One calibration of few problems with a budget to match."""
    argv = ["calibrate", "--url", server.url, "--out", str(out), "--seed", "64"]
    argv += ["--problems", "40", "--screen", "12", "--budget", "12", "--concurrency"]
    argv += ["4", "--thresholds", "0.5", "0.9", "--segmenters", "step", *more]
    return cli.main(argv)


def test_calibration_against_references_avoids_the_threshold_that_keeps_slips(
    server, tmp_path, capsys
):
    out = tmp_path / "parse.json"
    assert run(server, out) == 0
    config = ParseConfig.from_sources(path=str(out))
    assert (config.threshold, config.segmenter) == (0.9, "step")
    assert "Chosen: threshold=0.9, segmenter=step" in capsys.readouterr().out
    report = json.loads(out.with_suffix(".report.json").read_text())
    assert report["reference"] == "references"
    # Exact mode and the setting are timed on the same fresh problems.
    assert [t["problems"] for t in report["tested"][:2]] == [40, 40]
    assert report["tested"][0]["setting"] == {"mode": "exact"}
    assert report["tested"][1]["setting"]["mode"] == "semantic"
    # Screening and testing share no problem; screening goes there and back.
    asked = [
        tuple(b["input_ids"])
        for b in server.bodies
        if b["sampling_params"]["custom_params"].get("parse_threshold") == 0.9
    ]
    assert len(set(asked)) == 12 + 40 and len(asked) == 2 * 12 + 40


def test_written_setting_is_the_whole_one_that_was_measured(server, tmp_path):
    """Red if the file lacks what the server's own flags added: loaded alone it would
    be another setting than the tested one."""
    server.settings |= {
        "judge_suffix": "Right?",
        "window": 64,
        "compose": "eagle3",
        "threshold": 0.2,
        "keep_rule": "longest",
        "mode": "exact",
    }
    out = tmp_path / "parse.json"
    assert run(server, out) == 0
    assert json.loads(out.read_text()) == {
        "judge_suffix": "Right?",
        "window": 64,
        "threshold": 0.9,
        "segmenter": "step",
        "keep_rule": "longest",
        "mode": "semantic",
    }
    report = json.loads(out.with_suffix(".report.json").read_text())
    assert (report["seed"], report["concurrency"]) == (64, 4)


def test_server_that_streams_pieces_is_refused():
    """Red if the last piece of an answer is graded as the whole: then all settings fail
    alike, and any is chosen."""
    info = {"internal_states": [{"parse": {"settings": {}}}]}
    info["speculative_draft_model_path"] = "a draft"
    assert served_settings(info, "URL") == {}
    # A threshold holds for one judge only, so the judge is always written.
    settings = info["internal_states"][0]["parse"]["settings"]
    settings |= {"judge": "question", "threshold": 0.5}
    assert served_settings(info, "URL") == {"judge": "question"}
    info["internal_states"][0]["parse"]["settings"] = {"client_options": "safe"}
    with pytest.raises(ValueError, match="start it with .*client-options all"):
        served_settings(info, "URL")
    info["internal_states"][0]["parse"]["settings"] = {"client_options": "all"}
    assert served_settings(info, "URL") == {}
    info["incremental_streaming_output"] = True
    with pytest.raises(ValueError, match="without --incremental-streaming-output"):
        served_settings(info, "URL")


def test_server_without_a_draft_model_is_refused(server, tmp_path, capsys):
    """Red if every setting is tried in the mode that such a server falls back to."""
    server.draft = None
    assert run(server, tmp_path / "parse.json") == 1
    assert "has no draft model to judge" in capsys.readouterr().err


def test_server_without_parse_is_refused(server, tmp_path, capsys):
    server.settings = None
    assert run(server, tmp_path / "parse.json") == 1
    assert "does not serve with PARSE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--prompts", "/nowhere"], "'/nowhere' cannot be read as lines of JSON"),
        (["--concurrency", "0"], "--concurrency is 0; expected a whole number from 1"),
        (["--screen", "0"], "--screen is 0; expected a whole number from 1"),
        (["--out", "/"], "--out '/' cannot be written"),
        (["--out", "/nowhere/x.json"], "--out '/nowhere/x.json' cannot be written"),
    ],
)
def test_mistakes_are_told_before_anything_is_asked(
    server, tmp_path, capsys, flags, message
):
    """Red if a slip is a traceback, hangs, or costs the run its results."""
    assert run(server, tmp_path / "parse.json", *flags) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
    assert not server.bodies


def test_server_that_fails_is_named(server, tmp_path, capsys, monkeypatch):
    """Red if an error of the server reaches the user as a traceback."""
    monkeypatch.setattr(server, "answer", lambda body: 1 / 0)
    assert run(server, tmp_path / "parse.json") == 1
    assert server.url in capsys.readouterr().err


def test_chat_template_options_reach_the_template(server, tmp_path, capsys):
    asked = []
    template = CharTokenizer.apply_chat_template

    def record(self, messages, **options):
        asked.append(options.pop("enable_thinking"))
        return template(self, messages, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CharTokenizer, "apply_chat_template", record)
        more = ["--chat-template-json", '{"enable_thinking": false}']
        assert run(server, tmp_path / "parse.json", *more) == 0
    assert asked and not any(asked)
    with pytest.raises(SystemExit):
        run(server, tmp_path / "x.json", "--chat-template-json", "[1]")
    assert "'[1]' is no JSON object" in capsys.readouterr().err


def test_calibration_without_references_asks_for_agreement(server, tmp_path):
    from sglang_parse.embedded.task import make_problems

    prompts = tmp_path / "prompts.jsonl"
    rows = [{"prompt": p.prompt} for p in make_problems(60, 64)]
    prompts.write_text("\n".join(map(json.dumps, rows)))
    out = tmp_path / "parse.json"
    assert run(server, out, "--prompts", str(prompts)) == 0
    report = json.loads(out.with_suffix(".report.json").read_text())
    assert report["reference"] == "agreement with target-only answers"
    assert ParseConfig.from_sources(path=str(out)).threshold == 0.9
    assert report["exact"]["lost"] == 0
