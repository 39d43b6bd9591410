"""Figures that several pages quote stand in docs/figures.toml alone."""

import runpy
import tomllib
from pathlib import Path
from types import SimpleNamespace

import pytest

ROOT = Path(__file__).parents[2]
SCRIPT = SimpleNamespace(**runpy.run_path(str(ROOT / "docs" / "figures.py")))
VALUES = SCRIPT.figures()


@pytest.mark.parametrize("page", SCRIPT.pages(), ids=lambda p: str(p.relative_to(ROOT)))
def test_figures_of_a_page_are_those_of_the_file(page):
    """Red if a page shows another figure than docs/figures.toml, or an unknown one."""
    text = page.read_text()
    assert SCRIPT.filled(text, VALUES) == text


def test_every_figure_is_quoted_and_has_a_source():
    """Red if the file keeps a figure that no page shows, or a source that is gone."""
    shown = "".join(page.read_text() for page in SCRIPT.pages())
    assert [key for key in VALUES if f"<!--f:{key}-->" not in shown] == []
    groups = tomllib.loads((ROOT / "docs" / "figures.toml").read_text())
    assert all((ROOT / rows["source"]).exists() for rows in groups.values())
