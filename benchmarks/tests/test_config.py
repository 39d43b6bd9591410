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


CONFIGS = Path(__file__).parents[2] / "benchmarks" / "configs"


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.yaml")), ids=lambda p: p.name)
def test_shipped_configs_are_valid(path):
    config = load_config(path)
    assert config.arms[0].name == "target"
    assert "--max-running-requests" in config.server_args


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
