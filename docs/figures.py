"""Figures that several pages quote stand in docs/figures.toml.

A page marks one by its key, `<!--f:real.head_1-->1.3x<!--f-->`. To check the pages, or
to fill the figures in:

    python docs/figures.py [--write]
"""

from __future__ import annotations

import re
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
MARK = re.compile(r"(<!--f:([\w.]+)-->)(.*?)(<!--f-->)", re.DOTALL)


def figures() -> dict[str, str]:
    """Key, such as `real.head_1`, to the figure. Sources are left out."""
    groups = tomllib.loads((ROOT / "docs" / "figures.toml").read_text())
    return {
        f"{group}.{key}": text
        for group, rows in groups.items()
        for key, text in rows.items()
        if key != "source"
    }


def pages() -> list[Path]:
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def filled(text: str, values: dict[str, str]) -> str:
    """The page with its figures. Raises KeyError if it marks one that is unknown."""
    return MARK.sub(lambda m: m[1] + values[m[2]] + m[4], text)


def main(args: Sequence[str]) -> int:
    """Status 1 if a page shows another figure and is not rewritten."""
    values, status = figures(), 0
    for page in pages():
        text = page.read_text()
        if (new := filled(text, values)) == text:
            continue
        if "--write" in args:
            page.write_text(new)
        else:
            sys.stderr.write(f"{page.relative_to(ROOT)} does not show figures.toml\n")
            status = 1
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
