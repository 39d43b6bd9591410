"""The commands of the documents are understood by the programs that they start, and
CONTRIBUTING.md says which tests execute them."""

import argparse
import os
import re
import runpy
import subprocess
import sys

import pytest

from sglang_parse.cli.main import build_parser
from tests.support.documents import ROOT, commands

COMMANDS = [(page.name, words) for page, words in commands()]
LAUNCH = ["python", "-m", "sglang.launch_server"]
TABLE = (ROOT / "CONTRIBUTING.md").read_text().partition("| Command | Executed |")[2]
#: (beginnings of commands, what executes them) of each row.
ROWS = [
    (re.findall(r"`([^`]+)`", names), where)
    for names, where in re.findall(r"^\| (`.*?) \| (.*) \|$", TABLE, re.M)
]


class Understood(Exception):
    """The command's arguments have been read."""


def is_launch(words):
    return any(words[i : i + 3] == LAUNCH for i in range(len(words)))


@pytest.mark.parametrize(
    ("page", "words"), [c for c in COMMANDS if is_launch(c[1])], ids=str
)
def test_a_documented_server_is_understood(page, words, plugins):
    """Red if a flag is misspelt, or has a value that is none of its own."""
    from sglang.srt.server_args import ServerArgs

    from sglang_parse.options.server import ParseConfig
    from sglang_parse.plugin.flags import CONFIG_DEST, SERVER_TABLE, flag_values

    start = next(i for i in range(len(words)) if words[i : i + 3] == LAUNCH)
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    flags = [word for word in words[start + 3 :] if word != "..."]
    if "--model-path" not in flags:
        flags += ["--model-path", "TARGET"]
    values = flag_values(parser.parse_args(flags), SERVER_TABLE)
    values.pop(CONFIG_DEST)
    ParseConfig.from_sources(values)


@pytest.mark.parametrize(
    ("page", "words"),
    [
        (page, words)
        for page, words in COMMANDS
        if words[:2] == ["python", "-m"] and not is_launch(words)
    ],
    ids=str,
)
def test_a_documented_program_is_understood(page, words, monkeypatch, tmp_path):
    """Red if a program is gone, or has no such flag."""
    if words[2].startswith("sglang_router"):
        router = pytest.importorskip("sglang_router.launch_router")
        assert router.parse_router_args(words[3:]).worker_urls
        return
    parse_args = argparse.ArgumentParser.parse_args

    def read_alone(*args, **kwargs):
        parse_args(*args, **kwargs)
        raise Understood

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", read_alone)
    monkeypatch.setattr(sys, "argv", words[2:])
    monkeypatch.chdir(tmp_path)
    for word in words:
        if word.endswith(".txt"):  # read with the arguments
            (tmp_path / word).touch()
    with pytest.raises(Understood):
        runpy.run_module(words[2], run_name="__main__")


@pytest.mark.parametrize(
    ("page", "words"),
    [c for c in COMMANDS if c[1][0] in ("make", "sglang-parse")],
    ids=str,
)
def test_a_documented_command_is_understood(page, words):
    """Red if a command or a target of make is gone, or has no such flag."""
    if words[0] == "make":
        # Without what was told to a make that runs these tests.
        env = {k: v for k, v in os.environ.items() if k not in ("MAKEFLAGS", "ARGS")}
        dry = subprocess.run(
            ["make", "-n", *words[1:]],
            cwd=ROOT,
            capture_output=True,
            text=True,
            env=env,
        )
        assert dry.returncode == 0, dry.stderr
        words = (re.findall(r"sglang-parse demo.*", dry.stdout) or [""])[0].split()
    if words:
        build_parser().parse_args(words[1:])


def test_every_command_is_executed_or_listed():
    """Red if a command joins the documents without a row in CONTRIBUTING.md, or a row
    names a test that is gone, or a command that no page shows."""
    names = [name for names, _ in ROWS for name in names]
    shown = [" ".join(words) for _, words in COMMANDS]
    assert [c for c in shown if not any(name in c for name in names)] == []
    assert [name for name in names if not any(name in c for c in shown)] == []
    for names, where in ROWS:
        paths = re.findall(r"`((?:tests|benchmarks)/[^`]+)`", where)
        assert all((ROOT / path).exists() for path in paths), where
        assert paths or re.search("CI|card|hours|shell", where), names
