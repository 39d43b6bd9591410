"""Reading a benchmark's YAML: defaults, arms, and one sentence for each mistake."""

from pathlib import Path

import pytest
import yaml

from benchmarks.harness.__main__ import main
from benchmarks.harness.arms import ARMS, Models, server_flags
from benchmarks.harness.config import load_config, read_config
from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH

BASE = {
    "out": "results",
    "target": "embedded:target",
    "draft": "embedded:draft",
    "server_args": ["--max-running-requests", 8],
    "datasets": ["embedded"],
    "arms": ["target", "parse"],
}
SWEEP = {
    "arm": "parse",
    "dataset": "embedded",
    "concurrency": 1,
    "grid": [{"parse_threshold": [0.5]}],
}


def own_flags(*flags):
    return {"arms": [{"name": "p", "like": "parse", "server_args": [*flags]}]}


CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_are_valid(path):
    config = load_config(path)
    assert config.arms[0].name == "target"
    assert "--max-running-requests" in config.server_args


def test_embedded_config_has_every_arm_that_needs_no_gpu():
    names = {arm.name for arm in load_config(CONFIGS / "embedded.yaml").arms}
    assert names >= {
        *("target", "draft", "cascade", "sequential", "sequential-server"),
        *("exact", "parse-no-tail", "parse", "hostile", "hostile-exact", "off"),
        *("eagle3", "parse-eagle3", "parse-fixed"),
    }


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"arms": ["dance"]}, "arms: 'dance' is unknown; expected one of target,"),
        ({"arms": ["parse", "parse"]}, "name one arm twice"),
        ({"arms": []}, "arms is missing"),
        (
            {
                "arms": [
                    {
                        "name": "p",
                        "like": "parse",
                        "server_args": ["--max-running-requests=4"],
                    }
                ]
            },
            "arms.p.server_args holds --max-running-requests; arms share it: give it "
            "as `server_args` of the file",
        ),
        (
            {
                "arms": [
                    {
                        "name": "p",
                        "like": "parse",
                        "server_args": ["--speculative-parse-threshold", 0.9],
                    }
                ]
            },
            "arms share it: give it as `threshold` of the file",
        ),
        ({"datasets": ["gsm9k"]}, "datasets: 'gsm9k' is unknown; expected one of"),
        ({"datasets": "gsm8k"}, "datasets is 'gsm8k'; expected a list"),
        ({"server_args": []}, "server_args lacks --max-running-requests"),
        ({"concurrency": [0]}, "concurrency is 0; expected a whole number"),
        (
            {"arms": [{"name": "parse", "concurrency": [0]}]},
            "arms.parse.concurrency is 0; expected a whole number",
        ),
        (
            {"arms": [{"name": "parse", "concurrency": 8}]},
            "arms.parse.concurrency is 8; expected a list",
        ),
        ({"laps": 0}, "laps is 0; expected a whole number from 1 to 1000"),
        ({"laps": 2.5}, "laps is 2.5; expected a whole number from 1 to 1000"),
        ({"threshold": 3}, "threshold is 3; expected a number"),
        ({"colour": 1}, r"unknown keys \['colour'\]"),
        ({"target": ""}, "target is missing"),
        ({"arms": [{"name": "x", "like": "parse", "flags": 1}]}, r"keys \['flags'\]"),
        (
            {"arms": [{"name": "x", "like": "parse", "options": {"parse_tail": 1}}]},
            "custom_params.parse_tail is 1 and no PARSE option",
        ),
        (
            {"sweep": {**SWEEP, "arm": "exact"}},
            "sweep.arm is 'exact'; expected one of `arms`",
        ),
        (
            {"sweep": {**SWEEP, "grid": [{"parse_threshold": [5]}]}},
            "custom_params.parse_threshold is 5",
        ),
        (
            {"sweep": {**SWEEP, "arm": "target"}},
            "sweep.arm is 'target'; expected one of `arms` whose requests take",
        ),
        (
            {"sweep": {**SWEEP, "grid": ["x"]}},
            "entry of sweep.grid is .x.; expected",
        ),
        (
            {"arms": [{"name": "t", "like": "target", "server_args": ["--x"]}]},
            "arms.t.server_args: no server of an arm like 'target' speculates",
        ),
        (
            {"arms": [{"name": "parse", "server_args": "--tp 2"}]},
            "arms.parse.server_args is '--tp 2'; expected a list",
        ),
        (
            {"arms": [{"name": "cascade", "options": {"parse_threshold": 0.9}}]},
            "arms.cascade.options: requests of an arm like 'cascade' take none",
        ),
        (
            {"arms": [{"name": "t", "like": "target", "draft": "folder"}]},
            "arms.t.draft: an arm like 'target' loads no draft model",
        ),
        (
            {"arms": [{"name": "parse", "optional": True}]},
            "arms.parse.optional: the arm names no `draft` that may be missing",
        ),
        ({"judge": "http://x"}, "judge is 'http://x'; expected a mapping"),
        ({"judge": {"urll": "x"}}, r"judge has unknown keys \['urll'\]"),
        ({"judge": {"url": "x"}}, "judge lacks url or model"),
        ({"judge_suffix": 5}, "judge_suffix is 5; expected non-empty text"),
        ({"step_stop": 5}, "step_stop is 5; expected the text"),
        ({"chat_template": 3}, "chat_template is 3; expected a mapping"),
    ],
)
def test_mistakes_are_told_in_one_sentence(changes, message):
    with pytest.raises(ValueError, match=message) as caught:
        read_config({**BASE, **changes})
    assert "\n" not in str(caught.value)


def test_what_may_be_left_empty_or_written_otherwise():
    """Red if an empty key becomes a model called None, or a flag's other form is not
    seen."""
    flags = ["--max-running-requests=8"]
    config = read_config({**BASE, "eagle": None, "server_args": flags})
    assert config.models.eagle == ""


def test_command_names_an_unreadable_file(tmp_path, capsys):
    path = tmp_path / "broken.yaml"
    path.write_text("a: [")
    assert main([str(path)]) == 1
    error = capsys.readouterr().err
    assert "is not a readable YAML file" in error and len(error.splitlines()) == 1
    path.write_text(yaml.safe_dump({**BASE, "arms": ["dance"]}))
    assert main([str(path)]) == 1
    assert f"{path}: arms: 'dance' is unknown" in capsys.readouterr().err


def test_arm_like_another_adds_to_it():
    arm = {
        "name": "strict",
        "like": "parse-no-tail",
        "options": {"parse_threshold": 0.9},
        "server_args": ["--speculative-parse-window", 64],
    }
    config = read_config({**BASE, "arms": ["target", arm]})
    strict = config.arms[1]
    assert strict.options == {"parse_exact_tail": False, "parse_threshold": 0.9}
    assert strict.server_args == ("--speculative-parse-window", "64")
    assert ARMS["parse-no-tail"].options == {"parse_exact_tail": False}


def test_optional_arm_is_left_out_where_its_draft_is_missing(tmp_path):
    arm = {"name": "other", "like": "parse", "draft": str(tmp_path / "no")}
    names = [a.name for a in read_config({**BASE, "arms": [arm]}).arms]
    assert names == ["other"]
    names = [
        a.name
        for a in read_config(
            {**BASE, "arms": ["target", {**arm, "optional": True}]}
        ).arms
    ]
    assert names == ["target"]


def test_every_server_of_every_arm_has_the_common_flags():
    models = Models("embedded:target", "embedded:draft", "head")
    common = ("--max-running-requests", "8")
    for arm in ARMS.values():
        for kind in set(arm.servers.values()):
            flags = server_flags(arm, kind, models, common, str(DRAFT_PATH))
            assert flags[2:4] == list(common)
            model = DRAFT_PATH if kind == "draft" else TARGET_PATH
            assert flags[:2] == ["--model-path", str(model)]
            assert ("--speculative-algorithm" in flags) == (
                kind not in ("target", "draft")
            )


def test_every_arm_that_judges_asks_the_configured_question():
    """Red if servers judge by another question or threshold than the client's arms."""
    config = read_config({**BASE, "judge_suffix": "Right?", "threshold": 0.7})
    models = Models("embedded:target", "embedded:draft", "head")
    asked = ["--speculative-parse-threshold", "0.7"]
    asked += ["--speculative-parse-judge-suffix", "Right?"]
    judges = set()
    for arm in ARMS.values():
        for kind in set(arm.servers.values()):
            flags = server_flags(
                arm, kind, models, (), "d", judging=config.judging_flags
            )
            if all(flag in flags for flag in asked):
                judges.add(kind)
    assert judges == {"parse", "eagle3", "parse-eagle3"}


def test_sweep_is_a_product_without_repetitions():
    sweep = {
        "dataset": "embedded",
        "concurrency": 8,
        "grid": [
            {"parse_threshold": [0.5, 0.9], "parse_segmenter": ["step"]},
            {"parse_threshold": [0.9], "parse_segmenter": ["step", "line"]},
        ],
    }
    config = read_config({**BASE, "sweep": sweep})
    assert [tuple(c.values()) for c in config.sweep.combinations()] == [
        (0.5, "step"),
        (0.9, "step"),
        (0.9, "line"),
    ]
