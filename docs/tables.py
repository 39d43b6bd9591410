"""Tables of the options for the documentation.

A page shows a table between two markers, `<!-- options:NAME begin -->` and
`<!-- options:NAME end -->`, where NAME is `server`, `request` or `refused`. To check
the pages below a folder, or to rewrite the tables in them:

    python docs/tables.py [--write] docs
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from sglang_parse.options.request import REQUEST_TABLE
from sglang_parse.options.server import ParseConfig
from sglang_parse.options.table import (
    FLAG_PREFIX,
    Option,
    SharedOptions,
    grouped,
    options_of,
)

MARKER = re.compile(r"<!-- options:(\S+) (begin|end) -->")
BLOCK = re.compile(
    r"(<!-- options:(\S+) begin -->\n).*?(<!-- options:\2 end -->)", re.DOTALL
)
SHARED = frozenset(row.name for row in options_of(SharedOptions))


def server_table(rows: Sequence[Option] = options_of(ParseConfig)) -> str:
    """Markdown tables of the flags, one for each group."""
    columns = (f"Flag `{FLAG_PREFIX}*`", "Values", "Default", "Meaning")
    return "\n\n".join(
        f"**{title[0].upper()}{title[1:]}**\n\n"
        + _table(columns, [_server_cells(row) for row in of_group])
        for title, of_group in grouped(rows).items()
    )


def request_table(rows: Sequence[Option] = REQUEST_TABLE) -> str:
    """Markdown table of the request fields."""
    columns = ("Field", "Values", "Default", "In `parse_gen`", "Meaning")
    return _table(columns, [_request_cells(row) for row in rows])


def refused_table() -> str:
    """Markdown table of SGLang's flags that PARSE refuses."""
    from sglang_parse.plugin.refusals import SERVED, flag_of, told  # loads SGLang

    groups: dict[tuple[str, str], list[str]] = {}
    for field, (served, why) in SERVED.items():
        groups.setdefault((told(served), why), []).append(f"`{flag_of(field)}`")
    rows = [(", ".join(flags), *of_all) for of_all, flags in groups.items()]
    return _table(("Flags of SGLang", "Served", "What is missing"), rows)


TABLES = {"server": server_table, "request": request_table, "refused": refused_table}


def rewritten(page: str) -> str:
    """The page's text with its tables as they should be.

    Raises ValueError on an unknown table, or a marker without its partner.
    """
    for name, _ in MARKER.findall(page):
        if name not in TABLES:
            raise ValueError(
                f"the marker options:{name} names no table; expected options:"
                f"{' or options:'.join(TABLES)}."
            )
    if len(MARKER.findall(page)) != 2 * len(BLOCK.findall(page)):
        raise ValueError(
            "a marker has no partner; expected pairs of "
            "<!-- options:NAME begin --> and <!-- options:NAME end -->."
        )
    return BLOCK.sub(lambda m: f"{m[1]}\n{TABLES[m[2]]()}\n\n{m[3]}", page)


def find_faults(folder: Path, *, write: bool = False) -> list[str]:
    """What is wrong with the tables below `folder`, one sentence each.

    write: rewrite stale tables, which are then no faults.
    """
    faults = []
    missing = set(TABLES)
    for path in sorted(folder.rglob("*.md")):
        page = path.read_text(encoding="utf-8")
        missing -= {name for name, _ in MARKER.findall(page)}
        try:
            fresh = rewritten(page)
        except ValueError as e:
            faults.append(f"{path}: {e}")
            continue
        if fresh != page and write:
            path.write_text(fresh, encoding="utf-8")
        elif fresh != page:
            faults.append(
                f"{path}: a table of options is not up to date; run "
                f"python docs/tables.py --write {folder}."
            )
    return faults + [
        f"{folder}: no page has the marker <!-- options:{name} begin -->."
        for name in sorted(missing)
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """Exit status: 0 if every table is up to date, else 1."""
    parser = argparse.ArgumentParser(
        prog="docs/tables.py",
        description="Check the tables of options in Markdown pages.",
    )
    parser.add_argument("--write", action="store_true", help="rewrite stale tables")
    parser.add_argument("folder", type=Path, help="where to look for *.md files")
    args = parser.parse_args(argv)
    faults = find_faults(args.folder, write=args.write)
    sys.stderr.writelines(f"{fault}\n" for fault in faults)
    return 1 if faults else 0


def _server_cells(row: Option) -> tuple[str, ...]:
    flag = f"`{row.flag.removeprefix(FLAG_PREFIX)}`"
    if row.kind.metavar:
        return flag, row.kind.values, _code(row.default), row.help
    values = f"on, off (`--no-{row.flag.removeprefix('--')}`)"
    return flag, values, "on" if row.default else "off", row.help


def _request_cells(row: Option) -> tuple[str, ...]:
    default = "the server's" if row.name in SHARED else _code(row.default)
    keyword = f"`{row.keyword}`" if row.keyword else ""
    return f"`{row.request_field}`", row.kind.values, default, keyword, row.help


def _code(value: object) -> str:
    """A default as code, spelt as in JSON; an empty text is none."""
    text = str(value).lower() if isinstance(value, bool) else str(value)
    return f"`{text}`" if text else "none"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    escaped = [[cell.replace("|", "\\|") for cell in line] for line in lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in escaped)


if __name__ == "__main__":
    sys.exit(main())
