"""The commands of the documents are understood by the programs that they start."""

import argparse
import re
import shlex
from pathlib import Path

import pytest

from sglang_parse.cli.main import build_parser

ROOT = Path(__file__).parents[2]
PAGES = (*sorted((ROOT / "docs").rglob("*.md")), ROOT / "README.md")
LAUNCH = ["python", "-m", "sglang.launch_server"]


def commands():
    """(page, words) of every command in a block of shell."""
    for page in PAGES:
        for block in re.findall(r"```bash\n(.*?)```", page.read_text(), re.S):
            for line in block.replace("\\\n", " ").splitlines():
                if "launch_server" in line or line.startswith("sglang-parse "):
                    words = shlex.split(line, comments=True)
                    yield page.name, [w for w in words if w != "..."]


@pytest.mark.parametrize(("page", "words"), commands())
def test_a_documented_command_is_understood(page, words, plugins):
    """Red if a flag is misspelt, or has a value that is none of its own."""
    if words[0] == "sglang-parse":
        build_parser().parse_args(words[1:])
        return
    from sglang.srt.server_args import ServerArgs

    from sglang_parse.options.server import ParseConfig
    from sglang_parse.plugin.flags import CONFIG_DEST, SERVER_TABLE, flag_values

    start = next(i for i in range(len(words)) if words[i : i + 3] == LAUNCH)
    parser = argparse.ArgumentParser(exit_on_error=False)
    ServerArgs.add_cli_args(parser)
    flags = words[start + 3 :]
    if "--model-path" not in flags:
        flags += ["--model-path", "TARGET"]
    values = flag_values(parser.parse_args(flags), SERVER_TABLE)
    values.pop(CONFIG_DEST)
    ParseConfig.from_sources(values)


def test_the_recipes_are_among_them():
    """Red if a page is renamed, or its commands are no longer found."""
    pages = [page for page, _ in commands()]
    assert pages.count("recipes.md") == 11
