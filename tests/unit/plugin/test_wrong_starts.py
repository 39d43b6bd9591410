"""Starts that cannot work: each ends with one sentence that names the flag.

A command line takes the way of a real start up to where models would be loaded. Some
run as real processes, which have to end at once and without a traceback.
"""

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

# Values of our own flags. `tests/unit/options/test_server.py` has each check's own.
VALUES = (
    *(("mode", "fast"), ("threshold", "nan"), ("window", "1.5"), ("judge", "no")),
    *(("verdict-tokens", "Yes/Yes"), ("compose", "eagle3"), ("drafters", "remote")),
    *(("probe", "/no/probe"), ("adaptive", "maybe")),
)
# What a folder lacks or has broken, by the name of its maker below -> what is told.
FOLDERS = {
    "missing": "is not a folder",
    "empty": "lacks config.json, weights",
    "a file": "is a file",
    "no name": "is empty",
    "cut weights": "download it again",
    "no weights": "lacks weights",
    "broken config": "has a broken config.json",
    "listed config": "config.json that is no JSON object",
    "broken tokenizer": "has a broken tokenizer.json",
    "no tokenizer": "lacks a tokenizer",
}


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


@pytest.mark.parametrize(("kind", "sentence"), FOLDERS.items())
def test_broken_folders_of_a_draft(capsys, broken, kind, sentence):
    """Red if Hugging Face's own error, which names no flag, ends the start."""
    path = broken(kind)
    told = told_of(capsys, DRAFT_FLAG, path)
    check(told, DRAFT_FLAG)
    assert repr(path) in told and sentence in told


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
