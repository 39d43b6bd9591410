"""The tables of options in the documentation."""

from pathlib import Path

from docs.tables import find_faults

DOCS = Path(__file__).parents[3] / "docs"


def test_written_tables_equal_the_options():
    """Red if an option, its default or its help changed and its page did not, or if a
    table is on no page."""
    assert not find_faults(DOCS)
