"""The tables of options in the documentation."""

from dataclasses import dataclass
from pathlib import Path

import pytest

from docs.tables import find_faults, main, rewritten, server_table
from sglang_parse.options.kinds import SWITCH
from sglang_parse.options.request import REQUEST_TABLE
from sglang_parse.options.table import ServerOptions, option, options_of
from sglang_parse.plugin.refusals import SERVED

DOCS = Path(__file__).parents[3] / "docs"
PAGE = """# Page

<!-- options:server begin -->
old
<!-- options:server end -->

Between.

<!-- options:refused begin -->
<!-- options:refused end -->

<!-- options:request begin -->
<!-- options:request end -->

After.
"""


def test_written_tables_equal_the_options():
    """Red if an option, its default or its help changed and its page did not, or if a
    table is on no page."""
    assert not find_faults(DOCS)


def test_tables_are_written_between_their_markers(tmp_path):
    """Red if the text around a table is touched, or a second run changes anything."""
    page = tmp_path / "guide" / "options.md"
    page.parent.mkdir()
    page.write_text(PAGE)
    assert main(["--write", str(tmp_path)]) == 0
    text = page.read_text()
    assert text.startswith(
        "# Page\n\n<!-- options:server begin -->\n\n**Most used**\n\n| Flag"
    )
    assert "\n\n<!-- options:server end -->\n\nBetween.\n\n<!--" in text
    assert text.endswith("\n\n<!-- options:request end -->\n\nAfter.\n")
    assert "old" not in text.splitlines()
    num_rows = len(options_of(ServerOptions)) + len(REQUEST_TABLE) + len(SERVED)
    assert text.count("\n| `") == num_rows
    assert rewritten(text) == text and main([str(tmp_path)]) == 0


def test_stale_page_is_named_and_left_alone(tmp_path, capsys):
    """Red if the check passes an old table, or writes without being asked to."""
    page = tmp_path / "options.md"
    page.write_text(PAGE)
    assert main([str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith(f"{page}: a table of options is not up to date; run python")
    assert page.read_text() == PAGE


def test_missing_tables_are_named(tmp_path):
    """Red if a table may disappear from the documentation."""
    (tmp_path / "page.md").write_text("No tables.")
    assert find_faults(tmp_path, write=True) == [
        f"{tmp_path}: no page has the marker <!-- options:refused begin -->.",
        f"{tmp_path}: no page has the marker <!-- options:request begin -->.",
        f"{tmp_path}: no page has the marker <!-- options:server begin -->.",
    ]


@pytest.mark.parametrize(
    ("page", "message"),
    [
        ("<!-- options:servers begin -->\n", "options:servers names no table; expect"),
        ("<!-- options:server begin -->\n", "a marker has no partner"),
        ("<!-- options:server end -->\n", "a marker has no partner"),
        (PAGE.replace("options:request end", "options:server end"), "has no partner"),
    ],
)
def test_broken_markers_are_refused(page, message):
    """Red if a mistyped marker leaves a table unchecked, or eats a page."""
    with pytest.raises(ValueError, match=message):
        rewritten(page)


def test_bars_in_cells_do_not_break_the_table():
    """Red if a help text with a bar opens another column."""

    @dataclass(frozen=True)
    class Barred:
        either: bool = option(False, SWITCH, "One | two.")

    last = server_table(options_of(Barred)).splitlines()[-1]
    assert last.endswith("| off | One \\| two. |")
