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

# Words that only this project used in such a sense. Say "no GPU", "many", "continue".
PRIVATE = re.compile(
    r"\b(nobody|so many|(go|goes|going) on|(write|read)s on|whoever|shipped)\b", re.I
)


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_relative_links_lead_to_a_file(path):
    """Red if a document, or a picture, that another one links to was moved."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    missing = [x for x in links if not (path.parent / x).exists()]
    assert not missing


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_pages_use_ordinary_words(path):
    """Red if a page uses a word that a reader who is new to the project stumbles on."""
    text = re.sub(r"```.*?```|\"PARSE cannot go on\"", "", path.read_text(), flags=re.S)
    assert PRIVATE.findall(text) == []


def test_readme_is_short():
    """Red if the README grows over 120 lines; write a page in docs/ instead."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120
