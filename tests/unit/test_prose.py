"""The documents are in plain English, and their links lead somewhere."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAX_WORDS = 25  # as CONTRIBUTING.md asks
DECISIONS = sorted((ROOT / "docs" / "decisions").glob("0*.md"))
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md")),
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if p not in DECISIONS),
    ROOT / "benchmarks" / "README.md",
]


def blocks(text: str) -> list[str]:
    """Paragraphs, list items and headings; without code, tables and comments."""
    text = re.sub(r"^( *)```.*?^ *```", "", text, flags=re.S | re.M)
    text = re.sub(r"<!--.*?-->", "", text, flags=re.S)
    found: list[str] = [""]
    for line in text.splitlines():
        bare = line.strip()
        if not bare or bare.startswith(("|", "#", "--8<--", "!!!")):
            found.append(bare.lstrip("#! ") if bare.startswith(("#", "!!!")) else "")
            if bare:
                found.append("")
            continue
        if re.match(r"[-*>] |\d+\. ", bare):
            found.append("")
            bare = re.sub(r"^([-*>]|\d+\.) ", "", bare)
        found[-1] += " " + bare
    return [b.strip() for b in found if b.strip()]


def sentences(text: str) -> list[str]:
    """Sentences as a reader sees them: a link is its text, code in a line is a word."""
    found = []
    for block in blocks(text):
        block = re.sub(r"!\[[^]]*\]\([^)]*\)", "", block)
        block = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", block)
        block = re.sub(r"`[^`]*`", "code", block).replace("*", "")
        found += re.split(r"(?<=[.!?])\s+", block)
    return [s for s in found if s]


def name(path: Path) -> str:
    return str(path.relative_to(ROOT))


def test_sentences_are_split_as_a_reader_sees_them():
    """Red if code, tables or list items are counted into a sentence."""
    text = (
        "# Head\n\nOne `a b c`\nis [a word](x.md). Two.\n\n| a. b. c |\n\n"
        "- Item\n  goes on.\n- Next\n\n```\nno. no.\n```\n"
    )
    assert sentences(text) == [
        *("Head", "One code is a word.", "Two.", "Item goes on.", "Next")
    ]


@pytest.mark.parametrize("path", PAGES, ids=name)
def test_no_sentence_is_too_long(path):
    """Red if a sentence of a document has more than 25 words."""
    long = [s for s in sentences(path.read_text()) if len(s.split()) > MAX_WORDS]
    assert not long, "\n".join(long)


@pytest.mark.parametrize("path", [*PAGES, *DECISIONS], ids=name)
def test_no_word_that_is_no_word(path):
    """Red if a document uses `so-manieth`; write `every Nth`."""
    assert "so-manieth" not in path.read_text().lower()


@pytest.mark.parametrize("path", [*PAGES, *DECISIONS], ids=name)
def test_relative_links_lead_to_a_file(path):
    """Red if a document, or a picture, that another one links to was moved."""
    links = re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", path.read_text())
    missing = [x for x in links if not (path.parent / x).exists()]
    assert not missing


def test_readme_is_short():
    """Red if the README grows over 120 lines; write a page in docs/ instead."""
    assert len((ROOT / "README.md").read_text().splitlines()) <= 120


def test_glossary_is_short():
    """Red if the project coins more words than a newcomer can keep."""
    text = (ROOT / "docs" / "concepts.md").read_text()
    rows = re.findall(r"^\| (?!Word|-)", text.split("## Glossary")[1], flags=re.M)
    assert 0 < len(rows) <= 15
