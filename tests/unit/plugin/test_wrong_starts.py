"""Starts that cannot work: each ends with one sentence that names the flag.

A command line takes the way of a real start up to where models would be loaded. Some
run as real processes, which have to end at once and without a traceback.
"""

import json
import shutil
import subprocess
import sys
import time

import pytest

from sglang_parse.embedded import DRAFT_PATH, HEAD_PATH, TARGET_PATH
from sglang_parse.plugin.start_checks import StartError
from tests.support.resolution import DRAFT, TARGET, resolve

pytestmark = pytest.mark.usefixtures("plugins")

OWN = "--speculative-parse-"
DRAFT_FLAG = "--speculative-draft-model-path"
HEAD_FLAG = f"{OWN}eagle-model-path"
CONFIG = f"{OWN}config"

# Values of our own flags.
VALUES = (
    *(("mode", "fast"), ("mode", ""), ("threshold", "2.5"), ("threshold", "-1")),
    *(("threshold", "high"), ("keep-rule", "first"), ("segmenter", "words")),
    *(("segmenter", "fixed:0"), ("judge-every", "-1"), ("judge-every", "two")),
    *(("window", "-1"), ("window", "1.5"), ("window", "8k"), ("judge-suffix", "")),
    *(("recover-segments", "some"), ("max-segments", "-1"), ("max-segments", "x")),
    *(("verdict-tokens", ""), ("max-round-ms", "soon"), ("verify-route", "fast")),
    *(("compose", "eagle2"), ("compose", "eagle3"), ("eagle-steps", "-1")),
    *(("drafters", "parrot"), ("drafters", "remote"), ("ngram-tokens", "-1")),
    *(("draft-url", "no address"), ("draft-url-streams", "0"), ("judge", "nobody")),
    *(("probe", "/no/probe"), ("probe-check", "2"), ("probe-agreement", "2")),
    *(("window", "9999999"), ("max-segments", "5000"), ("judge-every", "5000")),
    *(("adaptive", "maybe"), ("exact-tail", "0"), ("client-options", "some")),
    *(("judge-suffix", "   "), ("verdict-tokens", "Yes/Yes"), ("threshold", "nan")),
)
# What a folder lacks or has broken, by the name of its maker below.
FOLDERS = (
    *("missing", "empty", "a file", "no name", "cut weights", "no weights"),
    *("broken config", "listed config", "broken tokenizer", "no tokenizer"),
)
CONFIGS = ("missing", "no name", "no JSON", "a list", "unknown key", "wrong value")


@pytest.fixture
def broken(tmp_path):
    """Kind of a broken folder -> its path."""

    def make(kind):
        folder = tmp_path / "model"
        if kind == "missing":
            return "/no/such/model"
        if kind == "no name":
            return ""
        if kind == "a file":
            folder.write_text("no folder")
            return str(folder)
        if kind == "empty":
            folder.mkdir()
            return str(folder)
        shutil.copytree(DRAFT_PATH, folder)
        if kind == "cut weights":
            file = next(folder.glob("*.safetensors"))
            file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
        for gone in {"no weights": ["*.safetensors"], "no tokenizer": ["token*"]}.get(
            kind, ()
        ):
            for file in folder.glob(gone):
                file.unlink()
        for name, text in {
            "broken config": {"config.json": "{"},
            "listed config": {"config.json": "[]"},
            "broken tokenizer": {"tokenizer.json": "{"},
        }.get(kind, {}).items():
            (folder / name).write_text(text)
        return str(folder)

    return make


@pytest.fixture
def settings(tmp_path):
    """Kind of a wrong file of settings -> its path."""

    def make(kind):
        if kind in ("missing", "no name"):
            return "/no/such/file" if kind == "missing" else ""
        file = tmp_path / "parse.json"
        file.write_text(
            {
                "no JSON": "{",
                "a list": "[1]",
                "unknown key": json.dumps({"windows": 3}),
                "wrong value": json.dumps({"window": "many"}),
            }[kind]
        )
        return str(file)

    return make


def told_of(capsys, *flags):
    """What ends the start of a server with these flags."""
    with pytest.raises((StartError, ValueError, SystemExit)) as error:
        resolve(*TARGET, *flags)
    if not isinstance(error.value, ValueError):  # argparse shows its usage in front
        assert error.value.code == 2
        return capsys.readouterr().err.strip().splitlines()[-1]
    return str(error.value)


def check(told, flag):
    assert flag in told, told
    assert "\n" not in told and "Traceback" not in told
    assert len(told) < 2500


@pytest.mark.parametrize(("name", "value"), VALUES, ids=str)
def test_wrong_values(name, value):
    """Red if a wrong value of our flags is taken, or told without its flag or behind
    all of SGLang's usage."""
    with pytest.raises(ValueError) as error:
        resolve(*TARGET, *DRAFT, f"{OWN}{name}={value}")
    check(str(error.value), f"{OWN}{name}")


@pytest.mark.parametrize("kind", FOLDERS)
def test_broken_folders_of_a_draft(capsys, broken, kind):
    """Red if Hugging Face's own error, which names no flag, ends the start."""
    path = broken(kind)
    told = told_of(capsys, DRAFT_FLAG, path)
    check(told, DRAFT_FLAG)
    assert repr(path) in told


@pytest.mark.parametrize("kind", CONFIGS)
def test_wrong_files_of_settings(capsys, settings, kind):
    """Red if a file is ignored or told without the flag that names it."""
    flag = f"{OWN}window" if kind == "wrong value" else CONFIG
    check(told_of(capsys, *DRAFT, CONFIG, settings(kind)), flag)


def test_other_combinations(capsys, broken):
    """Red if one flag without the other one starts a server."""
    eagle = (f"{OWN}compose", "eagle3", HEAD_FLAG)
    check(told_of(capsys, *DRAFT, *eagle, "/no/head"), HEAD_FLAG)
    check(told_of(capsys, *DRAFT, *eagle, str(TARGET_PATH)), HEAD_FLAG)
    check(told_of(capsys, *DRAFT, HEAD_FLAG, str(HEAD_PATH)), f"{OWN}compose")
    check(told_of(capsys, *DRAFT, f"{OWN}compose", "mtp"), f"{OWN}compose")
    check(told_of(capsys, *DRAFT, f"{OWN}drafters", "ngram"), f"{OWN}drafters")


def test_a_real_start_ends_in_one_line():
    """Red if a process of a wrong start loads models, goes on for more than 10 s once
    it has told what is wrong (on a busy machine, for longer than it took to tell it),
    or shows a traceback."""
    began = time.monotonic()
    given = (*TARGET, f"{DRAFT_FLAG}=/no/such/model")
    command = [sys.executable, "-m", "sglang.launch_server", *given]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        lines = []
        for line in process.stderr:
            lines.append(line)
            if line.startswith(DRAFT_FLAG):
                break
        told = time.monotonic()
        rest = process.stderr.read()  # up to the end of the last process of the start
        code = process.wait(timeout=10)
    written = "".join(lines) + rest
    assert time.monotonic() - told < max(10, told - began), written[-2000:]
    assert code != 0
    assert "Traceback" not in written and "Load weight" not in written
    assert DRAFT_FLAG in lines[-1] and not rest.strip(), written[-2000:]
