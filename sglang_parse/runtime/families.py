"""Which families of models are served: `families.toml`, which refusals and docs read.

    python -m sglang_parse.runtime.families --write docs

writes the tables of docs/models.md.
"""

from __future__ import annotations

import argparse
import functools
import tomllib
from dataclasses import dataclass
from pathlib import Path

FILE = Path(__file__).with_name("families.toml")
PAGE = "models.md"
BEGIN, END = "<!-- families: begin -->", "<!-- families: end -->"
SEE = "docs/models.md lists the families that PARSE knows"
# A small model of attention alone whose tokens are known as text: any target's draft.
SMALL_DRAFT = "Qwen/Qwen3-0.6B"


@dataclass(frozen=True)
class Family:
    """One family of models."""

    name: str
    #: SGLang's names of its models, as in `architectures` of config.json.
    architectures: tuple[str, ...]
    is_served: bool
    #: Where it is not: why, as the end of a sentence that begins with its name.
    why: str = ""
    #: What a served one is served with, where that is not everything.
    limits: str = ""
    #: Whether requests with images are served, in `exact` at most.
    images: bool = False
    #: Whether its models keep a recurrent state besides KV.
    recurrent: bool = False
    #: How names of weights of its head for multi-token prediction begin; "" where no
    #: test has proven such a head. {layers} is the number of the target's layers.
    mtp: str = ""
    #: Whether its models are heads of others.
    head: bool = False
    #: What has run; "" where no model of the family has.
    tested: str = ""
    #: Models with its tokenizer that are small enough to draft.
    drafts: str = ""


@dataclass(frozen=True)
class MostServed:
    """One of the families that people serve most."""

    name: str
    architectures: tuple[str, ...]

    def refused(self) -> tuple[str, ...]:
        """Its architectures that PARSE refuses."""
        return tuple(name for name in self.architectures if refusal_of(name))

    def told(self) -> str:
        """Whether it is served, in words."""
        refused = self.refused()
        if len(refused) == len(self.architectures):
            return "no"
        where = "on the CPU platform alone"
        words = where if any(map(is_recurrent, self.architectures)) else "yes"
        if refused:
            words += f"; {', '.join(f'`{name}`' for name in refused)} refused"
        return words


@functools.cache
def families() -> tuple[Family, ...]:
    """All of them, in the order of the file. Raises ValueError on a broken row."""
    found = []
    seen: set[str] = set()
    for row in tomllib.loads(FILE.read_text(encoding="utf-8"))["family"]:
        served = row.pop("served")
        names = tuple(row.pop("architectures"))
        if served not in ("yes", "no") or (served == "no") != ("why" in row):
            raise ValueError(f"{FILE.name}: {row['name']} needs yes, or no and why.")
        if twice := seen & set(names):
            raise ValueError(f"{FILE.name}: {sorted(twice)[0]} stands there twice.")
        seen.update(names)
        found.append(Family(architectures=names, is_served=served == "yes", **row))
    return tuple(found)


def most_served() -> tuple[MostServed, ...]:
    """The families that people serve most, in the order of the file."""
    rows = tomllib.loads(FILE.read_text(encoding="utf-8"))["most_served"]
    return tuple(MostServed(r["name"], tuple(r["architectures"])) for r in rows)


def refusal_of(architecture: str) -> str:
    """Why a model is refused by its family, as the end of "NAME ...", or ""."""
    for family in families():
        if architecture in family.architectures:
            return family.why
    return "belongs to no family that PARSE knows"


def reads_images_of(architecture: str) -> bool:
    """Whether requests with images are served by a model."""
    return any(architecture in f.architectures and f.images for f in families())


def is_recurrent(architecture: str) -> bool:
    """Whether a model keeps a recurrent state besides KV."""
    return any(architecture in f.architectures and f.recurrent for f in families())


def names_a_head(architecture: str) -> bool:
    """Whether a model is the head of another."""
    return any(architecture in f.architectures and f.head for f in families())


def mtp_weights_of(architecture: str) -> str:
    """How names of weights of a model's MTP head begin, "" without a proven one."""
    found = (f.mtp for f in families() if architecture in f.architectures)
    return next(found, "")


def served_table() -> str:
    """The families that are served, as a Markdown table."""
    rows = ["| Family | Architectures | Limits | What has run | Drafts |"]
    rows.append("|---|---|---|---|---|")
    for family in families():
        if family.is_served:
            tested = family.tested or "nothing yet; its attention is that of Llama"
            cells = (
                family.name,
                _names(family),
                _limits(family),
                tested,
                family.drafts or "none known",
            )
            rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def refused_table() -> str:
    """The families that are refused, as a Markdown table."""
    rows = ["| Family | Architectures | Why |", "|---|---|---|"]
    for family in families():
        if not family.is_served:
            rows.append(f"| {family.name} | {_names(family)} | It {family.why}. |")
    return "\n".join(rows)


def most_served_list() -> str:
    """Which of the families that people serve most are served, as a Markdown table
    behind a sentence that counts them."""
    rows = most_served()
    served = [row for row in rows if row.told() != "no"]
    in_part = sum(bool(row.refused()) for row in served)
    on_cpu = sum(any(map(is_recurrent, row.architectures)) for row in served)
    lines = [
        f"Of these {len(rows)} families, {len(served)} are served.",
        f"Of {in_part} of them some models are refused.",
        f"{on_cpu} are served on the CPU platform alone.",
        *("", "| | Family | Served |", "|---|---|---|"),
    ]
    lines += [f"| {i} | {r.name} | {r.told()} |" for i, r in enumerate(rows, start=1)]
    return "\n".join(lines)


def _limits(family: Family) -> str:
    images = "images in `exact` at most" if family.images else ""
    return "; ".join(filter(None, (images, family.limits))) or "none"


def _names(family: Family) -> str:
    return ", ".join(f"`{name}`" for name in family.architectures)


def page_with_tables(page: str) -> str:
    """`page` with all tables between its marks. Raises ValueError without marks."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"{PAGE} lacks {BEGIN} or {END}.")
    tables = (
        f"## The families that people serve most\n\n{most_served_list()}\n\n"
        f"## Families that are served\n\n{served_table()}\n\n"
        f"## Families that are refused\n\n{refused_table()}"
    )
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"


def main() -> None:
    parser = argparse.ArgumentParser(description="Write the tables of families.")
    parser.add_argument("--write", type=Path, required=True, help="the folder docs")
    page = parser.parse_args().write / PAGE
    page.write_text(
        page_with_tables(page.read_text(encoding="utf-8")), encoding="utf-8"
    )


if __name__ == "__main__":
    main()
