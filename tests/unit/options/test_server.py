"""ParseConfig: sources, their order, and one clear refusal per setting."""

import dataclasses
import json
import math
import os

import pytest

from sglang_parse.options.server import CONFIG_ENV, ParseConfig
from sglang_parse.options.table import HEADS_OF_PATH, flag_name
from sglang_parse.options.validation import parse_verdict_tokens

BAD = {
    "client_options": ["", "some", "ALL", None, True, ["safe"]],
    "window": [-1, 1.5, "256", True, None, (1 << 20) + 1, [1]],
    "max_segments": [0, -3, 2.0, "16", True, 1025],
    "judge_every": [-1, 1.0, "2", None, True, 1025],
    "judge": ["", "questions", None, 3, ["question"]],
    "segmenter": ["", "steps", "fixed:0", "fixed:x", "fixed:１", None, 3],
    "judge_suffix": ["", "Is PARSE-CUT-MARK ok?", " \n\t", None, 7, "x" * 2001],
    "verdict_tokens": ["", "Yes", "Yes/", "/No", "Yes/No,", "a/a", None, 3, ["Yes/No"]],
    "threshold": [-0.01, 2.1, math.nan, math.inf, "0.5", True, None],
    "keep_rule": ["", "first", "LONGEST", None, 1],
    "mode": ["", "auto", None, 0],
    "exact_head": [-1, 1.0, "2", None, True, (1 << 20) + 1],
    "exact_tail": ["true", 1, 0, None],
    "stream_tokens": [-1, 1.0, "2", None, True, (1 << 20) + 1],
    "recover_segments": [-1, 1.0, "1", "ALL", "", True, None, 1025],
    "compose": ["", "eagle", "EAGLE3", None, True, "eagle3", "nextn"],
    "eagle_model_path": [7, None, "head", ["head"]],
    "eagle_steps": [0, 65, 2.0, "4", True, None],
    "drafters": ["", "model,ngram", "ngram,ngram", "ngram, model", "other", None, 1],
    "draft_url": [None, 1, "host:80", "ftp://host", "http://", "http://host:x", " "],
    "draft_url_model": [None, 1, "m" * 201, "  "],
    "adaptive": ["false", 0, 1, None],
    "inert_messages": ["false", 0, 1, None],
    "max_round_ms": [-1, 0.5, "500", False, None, 10**7],
    "probe": [7, None, ["file"]],
    "probe_check": [-0.1, 1.1, "0.1", None, True],
    "probe_agreement": [-0.1, 1.1, "0.9", None],
    "probe_collect": [7, None, ["file"]],
    "prove": ["", "on", "FULL", None, True],
    "draft_compose": ["", "eagle2", "eagle3", "dflash", None, True],
    "draft_eagle_model_path": [7, None, ["head"]],
}


@pytest.fixture(autouse=True)
def no_config_env(monkeypatch):
    monkeypatch.delenv(CONFIG_ENV, raising=False)


def write(path, values):
    path.write_text(json.dumps(values), encoding="utf-8")
    return str(path)


def test_every_field_has_bad_values_here():
    """Red if a setting is added without a check and a test of it."""
    assert BAD.keys() == {f.name for f in dataclasses.fields(ParseConfig)}


def test_what_differs_from_the_defaults_is_told_as_flags():
    """Red if the start-up line leaves a setting out, or tells all of them."""
    assert ParseConfig().changes == ""
    changed = ParseConfig(window=64, adaptive=False, segmenter="line").changes
    assert changed == (
        "--speculative-parse-segmenter 'line', --speculative-parse-window 64, "
        "--speculative-parse-adaptive False"
    )


@pytest.mark.parametrize(
    ("field", "value"), [(f, v) for f, values in BAD.items() for v in values], ids=repr
)
def test_bad_value_names_its_flag(field, value):
    """Red if a check is dropped or names another flag."""
    with pytest.raises(ValueError, match=f"{flag_name(field)} is ") as error:
        ParseConfig(**{field: value})
    assert "expected" in str(error.value)


def test_flag_wins_over_file_over_default(tmp_path):
    """Red if the order of precedence changes, or a falsy flag counts as not given."""
    path = write(tmp_path / "c.json", {"threshold": 0.8, "window": 32})
    flags = {"threshold": None, "window": 0, "exact_tail": False}
    config = ParseConfig.from_sources(flags, path)
    assert (config.threshold, config.window, config.exact_tail) == (0.8, 0, False)
    assert config.max_segments == ParseConfig().max_segments


def test_environment_names_a_file(tmp_path, monkeypatch):
    """Red if sglang.Engine users lose their only route to the settings."""
    path = write(tmp_path / "env.json", {"mode": "exact"})
    monkeypatch.setenv(CONFIG_ENV, path)
    assert ParseConfig.from_sources().mode == "exact"
    assert ParseConfig.from_sources({"mode": "off"}).mode == "off"


def test_config_flag_wins_over_environment(tmp_path, monkeypatch):
    """Red if the environment overrides the command line."""
    monkeypatch.setenv(CONFIG_ENV, write(tmp_path / "env.json", {"mode": "exact"}))
    path = write(tmp_path / "flag.json", {"mode": "off"})
    assert ParseConfig.from_sources({}, path).mode == "off"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("not json", "is not a readable JSON file"),
        ("", "is not a readable JSON file"),
        ("[" * 200_000, "is not a readable JSON file"),
        *((text, "holds no JSON object; expected") for text in ('["mode"]', '"off"')),
        *((text, "holds no JSON object; expected") for text in ("0.5", "true", "null")),
        ('{"treshold": 0.5}', r"\['treshold'\] \(did you mean threshold\?\); expected"),
        ('{"speculative_parse_mode": "off"}', "unknown keys"),
    ],
)
def test_bad_file_names_the_flag_and_the_path(tmp_path, text, told):
    """Red if a broken or misspelt file is half used, or dies with a traceback."""
    path = tmp_path / "bad.json"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ValueError, match=f"--speculative-parse-config .*bad.* {told}"):
        ParseConfig.from_sources({}, str(path))


def test_what_is_no_text_file_names_the_flag(tmp_path):
    """Red if an unreadable file gives an OSError or UnicodeDecodeError, or one without
    an end is read for good."""
    binary, pipe = tmp_path / "weights.bin", tmp_path / "pipe"
    binary.write_bytes(b"\xff\xfe\x00\x80")
    os.mkfifo(pipe)
    for path in (tmp_path / "none.json", binary, tmp_path, pipe, "/dev/zero"):
        with pytest.raises(ValueError, match="--speculative-parse-config"):
            ParseConfig.from_sources({}, str(path))


@pytest.mark.parametrize("path", ["", " "])
def test_empty_path_names_the_flag(path, monkeypatch, tmp_path):
    """Red if `--speculative-parse-config "$UNSET"` is ignored without a word."""
    monkeypatch.setenv(CONFIG_ENV, write(tmp_path / "env.json", {"mode": "exact"}))
    with pytest.raises(
        ValueError, match=f"--speculative-parse-config is '{path}'; expected the path"
    ):
        ParseConfig.from_sources({}, path)


def test_empty_variable_counts_as_unset(monkeypatch):
    """Red if `SGLANG_PARSE_CONFIG=` stops a server that needs no file."""
    monkeypatch.setenv(CONFIG_ENV, "")
    assert ParseConfig.from_sources() == ParseConfig()


@pytest.mark.parametrize("value", ['"high"', "NaN"])
def test_bad_value_in_file_names_the_flag(tmp_path, value):
    """Red if values of a file skip the checks; NaN is below and above no score."""
    path = tmp_path / "c.json"
    path.write_text(f'{{"threshold": {value}}}', encoding="utf-8")
    with pytest.raises(ValueError, match="--speculative-parse-threshold"):
        ParseConfig.from_sources({}, str(path))


def test_verdict_tokens_split_into_pairs():
    """Red if spaces are stripped (they are part of a token) or pairs are lost."""
    assert parse_verdict_tokens("Yes/No", "f") == (("Yes", "No"),)
    assert parse_verdict_tokens(" Yes/ No,yes/no", "f") == (
        (" Yes", " No"),
        ("yes", "no"),
    )
    assert ParseConfig(verdict_tokens="A/B").verdict_pairs == (("A", "B"),)


def test_listed_drafters_are_those_that_other_flags_name():
    """Red if a drafter is listed and not there, or there and not listed."""
    head = {"compose": "eagle3", "eagle_model_path": "head"}
    assert ParseConfig().drafter_names == ()
    assert ParseConfig(drafters="ngram,eagle3", **head).drafter_names[1] == "eagle3"
    assert ParseConfig(drafters="mtp,model", compose="mtp").composes
    for name in HEADS_OF_PATH:
        own = {"compose": name, "eagle_model_path": "head"}
        listed = ParseConfig(drafters=f"ngram,{name},model", **own).drafter_names
        assert listed == ("ngram", name, "model")
    with pytest.raises(ValueError, match="speculative-parse-drafters is .*'mtp'"):
        ParseConfig(drafters="ngram", compose="mtp")
    with pytest.raises(ValueError, match="speculative-parse-compose is 'mtp' and "):
        ParseConfig(compose="mtp", eagle_model_path="head")
    for settings in ({"drafters": "eagle3"}, {"drafters": "ngram", **head}):
        with pytest.raises(
            ValueError, match="speculative-parse-drafters is .*'eagle3'"
        ):
            ParseConfig(**settings)
    of_draft = {"draft_compose": "eagle3", "draft_eagle_model_path": "head"}
    by_path = {"draft_eagle_model_path": "head"}
    wrong = (
        {"draft_compose": "eagle3"},
        *({"draft_compose": name, **by_path} for name in ("ngram", "mtp", "none")),
    )
    for settings in wrong:
        with pytest.raises(ValueError, match="draft-compose is .* or none with 'auto'"):
            ParseConfig(**settings)
    assert ParseConfig().draft_guesser == "ngram"
    assert ParseConfig(**by_path).draft_guesser == "eagle3"
    for settings in (of_draft, by_path, {"draft_compose": "mtp"}):
        ParseConfig(**settings).check_draft_model("draft")
        with pytest.raises(ValueError, match="expected the draft model of that head"):
            ParseConfig(**settings).check_draft_model(None)
    ParseConfig().check_draft_model("draft")
    ParseConfig(drafters="ngram").check_draft_model(None)
    ParseConfig(drafters="ngram,model").check_draft_model("draft")
    for drafters, path in (("ngram", "draft"), ("ngram,model", None)):
        with pytest.raises(ValueError, match="draft-model-path is .* name 'model'"):
            ParseConfig(drafters=drafters).check_draft_model(path)
    with pytest.raises(ValueError, match="draft-url is not set; .* name 'remote'"):
        ParseConfig(drafters="remote,model")
    with pytest.raises(ValueError, match="draft-url is set; .* name 'remote'"):
        ParseConfig(drafters="model", draft_url="http://host/v1")
    assert ParseConfig(drafters="remote", draft_url="http://host/v1").drafter_names


def test_credentials_in_an_address_are_shown_nowhere():
    """Red if the message that refuses a password prints it."""
    for url in ("http://me:hunter2@host/v1", "https://host/v1?api_key=hunter2"):
        with pytest.raises(ValueError, match="SGLANG_PARSE_DRAFT_API_KEY") as refused:
            ParseConfig(draft_url=url)
        assert "hunter2" not in str(refused.value)
