"""What a result file says of where it was made."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import provenance

REPOSITORY = provenance.REPOSITORY


@pytest.mark.parametrize(
    ("word", "shown"),
    [
        (str(REPOSITORY / "benchmarks" / "run.py"), "benchmarks/run.py"),
        ("/somewhere/else/out.json", "out.json"),
        (f"--out={Path.home()}/x/out.json", "--out=out.json"),
        (f"--config={REPOSITORY}/benchmarks/configs/a.yaml",)
        + ("--config=benchmarks/configs/a.yaml",),
        ("benchmarks/configs/embedded.yaml", "benchmarks/configs/embedded.yaml"),
        ("--repeats", "--repeats"),
        ("owner/model", "owner/model"),
    ],
)
def test_paths_are_told_relative_to_the_repository(word, shown):
    """Red if a result tells a folder of the machine that made it."""
    assert provenance.shown_path(word) == shown


def test_the_command_is_shown_without_folders(monkeypatch):
    """Red if `provenance` writes the command line as it stands."""
    monkeypatch.setattr(sys, "argv", ["/a/b/run.py", "--out", "/c/d.json"])
    assert provenance.provenance()["argv"] == ["run.py", "--out", "d.json"]


def test_committed_results_hold_no_absolute_paths():
    """Red if a result file with paths of some machine is committed."""
    command = ("git", "-C", str(REPOSITORY), "ls-files", "benchmarks/results")
    names = subprocess.run(command, capture_output=True, text=True).stdout.split()
    if not names:
        pytest.skip("no git checkout")
    absolute = re.compile(r"""["'\s=]/(?!v1/|generate)[\w.-]+/[\w.-]""")
    texts = {name: (REPOSITORY / name).read_text(errors="replace") for name in names}
    assert not [name for name, text in texts.items() if absolute.search(text)]
