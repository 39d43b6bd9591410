"""The links of the documents lead somewhere, and the front page stays short."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "benchmarks" / "README.md",
]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_relative_links_lead_to_a_file(path):
    """Red if a document, or a picture, that another one links to was moved."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    missing = [x for x in links if not (path.parent / x).exists()]
    assert not missing


def test_readme_is_short():
    """Red if the README grows over 120 lines; write a page in docs/ instead."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
