"""The tables of models.md, from sglang_parse/sgl/families.toml.

python docs/family_tables.py        rewrites them
"""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

from sglang_parse.sgl.families import FILE, family_of

PAGE = Path(__file__).with_name("models.md")
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"


def rows_of(table: str) -> list[dict[str, Any]]:
    """The rows `family` or `most_served` of the file, in its order."""
    rows: list[dict[str, Any]] = tomllib.loads(FILE.read_text(encoding="utf-8"))[table]
    return rows


def _served_table() -> str:
    rows = ["| Family | Architectures | Limits | What has run | Drafts |"]
    rows.append("|---|---|---|---|---|")
    for row in rows_of("family"):
        if row["served"] == "yes":
            images = "images in `exact` at most" if row.get("images") else ""
            chains = "`exact` at most" if row.get("chains") else ""
            limits = "; ".join(filter(None, (images, chains, row.get("limits", ""))))
            cells = (
                row["name"],
                _names(row["architectures"]),
                limits or "none",
                row["tested"],
                row.get("drafts") or "none known",
            )
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _refused_table() -> str:
    rows = ["| Family | Architectures | Why |", "|---|---|---|"]
    for row in rows_of("family"):
        if row["served"] == "no":
            names = _names(row["architectures"])
            why = re.sub(
                r"\(docs/(not-served/\S+)\)", r"([what it would take](\1))", row["why"]
            )
            rows.append(f"| {row['name']} | {names} | It {why}. |")
    return "\n".join(rows)


def how_served(architectures: list[str]) -> str:
    """Whether a family is served whose models have these names, in words."""
    refused = [name for name in architectures if family_of(name).why]
    if len(refused) == len(architectures):
        return "no"
    return f"yes; {_names(refused)} refused" if refused else "yes"


def _most_served_list() -> str:
    """Which of the families that people serve most are served, below a sentence that
    counts them."""
    told = {r["name"]: how_served(r["architectures"]) for r in rows_of("most_served")}
    served = [words for words in told.values() if words != "no"]
    lines = [
        f"Of these {len(told)} families, {len(served)} are served.",
        f"Of {sum('refused' in one for one in served)} of them some models are "
        "refused.",
        *("", "| | Family | Served |", "|---|---|---|"),
    ]
    return "\n".join(
        lines
        + [f"| {i} | {name} | {one} |" for i, (name, one) in enumerate(told.items(), 1)]
    )


def _names(architectures: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in architectures)


def page_with_tables(page: str) -> str:
    """`page` with all tables between its marks. Raises ValueError without marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE.name} lacks {BEGIN} or {END}.")
    tables = (
        f"## The families that people serve most\n\n{_most_served_list()}\n\n"
        f"## Families that are served\n\n{_served_table()}\n\n"
        f"## Families that are refused\n\n{_refused_table()}"
    )
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(page_with_tables(PAGE.read_text(encoding="utf-8")), "utf-8")
