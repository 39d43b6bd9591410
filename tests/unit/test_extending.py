"""docs/extending.md shows the package that the tests run, and api.py is light."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import sglang_parse.api

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "tests" / "support" / "extension_package"


def blocks(language: str) -> list[str]:
    page = (ROOT / "docs" / "extending.md").read_text()
    return re.findall(rf"^```{language}\n(.*?)^```", page, flags=re.S | re.M)


def test_code_of_the_page_is_the_packages():
    """Red if the page shows code that no test runs."""
    source = (PACKAGE / "parse_extensions.py").read_text()
    shown = blocks("python")
    assert len(shown) == 3
    assert all(block in source for block in shown)


def test_entry_points_of_the_page_are_the_packages():
    """Red if the page names a group or a name that the package does not."""
    (shown,) = blocks("toml")
    project = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]
    assert tomllib.loads(shown)["project"]["entry-points"] == project["entry-points"]


def test_examples_fit_on_a_screen():
    """Red if an extension takes more than the page promises."""
    assert all(len(block.splitlines()) <= 25 for block in blocks("python"))


def test_every_public_name_is_there():
    """Red if a name of the public interface leads nowhere."""
    names = sglang_parse.api.__all__
    assert [getattr(sglang_parse.api, name).__name__ for name in names]


def test_segmenters_and_judges_need_no_torch():
    """Red if importing sglang_parse.api, or what a segmenter or judge is typed with,
    loads torch or sglang."""
    code = (
        "import sys\n"
        "import sglang_parse.api as api\n"
        "assert api.DraftText and api.SegmentRule and api.Judge\n"
        "print([m for m in ('torch', 'sglang') if m in sys.modules])"
    )
    found = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert found.stdout.strip() == "[]"
