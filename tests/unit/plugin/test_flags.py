"""The flags on their way through SGLang's own parser to the worker."""

import argparse
import dataclasses
import pickle
import re

import pytest

from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from sglang_parse.options.server import CONFIG_ENV, ParseConfig
from sglang_parse.options.table import flag_name
from sglang_parse.plugin.flags import (
    OPTIONS_ATTRIBUTE,
    attach_options,
    config_from_server_args,
)

FIELDS = [f.name for f in dataclasses.fields(ParseConfig)]
BASE = [
    "--model-path",
    str(TARGET_PATH),
    "--speculative-draft-model-path",
    str(DRAFT_PATH),
    "--speculative-algorithm",
    "PARSE",
]

pytestmark = pytest.mark.usefixtures("plugins")


@pytest.fixture(autouse=True)
def no_config_env(monkeypatch):
    monkeypatch.delenv(CONFIG_ENV, raising=False)


def prepare(*flags: str):
    from sglang.srt.server_args import prepare_server_args

    return prepare_server_args([*BASE, *flags])


@pytest.fixture(scope="module")
def help_text(plugins):
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("COLUMNS", "80")  # long names are broken at hyphens
        return parser.format_help()


@pytest.mark.parametrize("field", [*FIELDS, "config"])
def test_every_setting_has_a_flag_in_help(help_text, field):
    """Red if a setting has no flag, or SGLang's --help does not show it."""
    assert flag_name(field) in help_text


def test_help_shows_defaults(help_text):
    """Red if a flag's help does not say what happens without it."""
    shown = " ".join(help_text.split())
    for field in ("window", "max_segments", "segmenter", "threshold", "keep_rule"):
        assert f"Default: {getattr(ParseConfig(), field)}." in shown
    (own,) = re.findall(r"parse-judge-every N (.*?) --speculative", shown)
    assert own.endswith("Default: 0.")


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (["--speculative-parse-adaptive"], True),
        (["--no-speculative-parse-adaptive"], False),
        (["--speculative-parse-adaptive=false"], False),
        (["--speculative-parse-adaptive", "true"], True),
        ([], True),
    ],
)
def test_switches_may_have_a_value(flags, value):
    """Red if `--speculative-parse-adaptive false` switches it on."""
    assert config_from_server_args(prepare(*flags)).adaptive is value


def test_a_misspelt_flag_is_told_what_is_meant(capsys):
    """Red if a flag of another's is met with one of ours."""
    for word, hint in (("parse-treshold", True), ("num-stps", False)):
        with pytest.raises(SystemExit):
            prepare(f"--speculative-{word}", "1")
        told = capsys.readouterr().err
        assert ("(did you mean --speculative-parse-threshold?)" in told) == hint


def test_flags_round_trip():
    """Red if a flag's value is lost, or lands in another setting."""
    given = {
        **{"window": 0, "max_segments": 3, "segmenter": "fixed:5", "judge_every": 2},
        **{"judge_suffix": "Right so far?", "verdict_tokens": "Yes/No,yes/no"},
        **{"threshold": 2.0, "keep_rule": "longest", "mode": "exact"},
        **{"client_options": "none", "inert_messages": False},
        **{"exact_tail": False, "recover_segments": "all", "adaptive": False},
        **{"stream_tokens": 5, "exact_head": 4, "prove": "full"},
        **{"draft_compose": "eagle3", "draft_eagle_model_path": "another/head"},
        **{"max_round_ms": 70, "compose": "eagle3", "eagle_model_path": "a/head"},
        **{"eagle_steps": 7, "drafters": "ngram,eagle3,remote,model"},
        **{"draft_url": "http://host:1/v1", "draft_url_model": "small"},
        "probe_check": 0.1,
        **{"probe_agreement": 0.9, "probe_collect": "pairs"},
    }
    # Another judge takes an installed package, and no question; a probe is read.
    assert set(FIELDS) - set(given) == {"judge", "probe"}
    words = []
    for name, value in given.items():
        flag = flag_name(name)
        off = flag.replace("--", "--no-", 1)
        words += [off] if value is False else [flag, str(value)]
    assert config_from_server_args(prepare(*words)) == ParseConfig(**given)


def test_only_plain_values_are_pickled():
    """Red if the record carries rows of the table, which children may not unpickle."""
    args = prepare("--no-speculative-parse-adaptive")
    (name,) = [name for name in vars(args) if name == OPTIONS_ATTRIBUTE]
    copy = pickle.loads(pickle.dumps(args))
    assert getattr(copy, name) == getattr(args, name)
    given = {k: v for k, v in getattr(copy, name).items() if v is not None}
    assert given == {"adaptive": False}


def test_flags_of_another_algorithm_are_refused():
    """Red if PARSE's flags are ignored by a server that does not serve it."""
    result, namespace = argparse.Namespace(), argparse.Namespace()
    namespace.speculative_parse_judge_every = 0
    namespace.speculative_algorithm = "EAGLE"
    with pytest.raises(ValueError, match="parse-judge-every is set but .* is EAGLE;"):
        attach_options(result, namespace)


def test_flags_survive_resolution():
    """Red if SGLang's resolution drops what rides on the record."""
    args = prepare("--speculative-parse-window", "12")
    args.resolve_once()
    assert config_from_server_args(pickle.loads(pickle.dumps(args))).window == 12


def test_sglangs_yaml_config_knows_our_flags(tmp_path):
    """Red if `--config file.yaml` refuses or drops the PARSE flags."""
    path = tmp_path / "server.yaml"
    path.write_text(
        "speculative-parse-window: 24\nspeculative-parse-keep-rule: longest\n"
    )
    config = config_from_server_args(prepare("--config", str(path)))
    assert (config.window, config.keep_rule) == (24, "longest")
