"""Which families of models are served: `families.toml`, as refusals read it."""

from __future__ import annotations

import functools
import tomllib
from dataclasses import dataclass, fields
from pathlib import Path

FILE = Path(__file__).with_name("families.toml")
SEE = "docs/models.md lists the families that PARSE knows"
EXPECTED = (
    "expected a model of a family that docs/models.md lists as served, or a start "
    "without --speculative-algorithm PARSE"
)
# A small model of attention alone whose tokens are known as text: any target's draft.
SMALL_DRAFT = "Qwen/Qwen3-0.6B"


@dataclass(frozen=True)
class Family:
    """What start-up reads of a family; docs/family_tables.py shows more columns."""

    #: Why it is refused, as the end of a sentence that begins with its name; "" if not.
    why: str = ""
    #: Whether requests with images are served, in `exact` at most.
    images: bool = False
    #: Whether a pass of it is a chain of tokens in decode rows, so that no request is
    #: judged: all are served in `exact` at most.
    chains: bool = False
    #: How names of weights of its head for multi-token prediction begin; "" where no
    #: test has proven such a head. {layers} is the number of the target's layers.
    mtp: str = ""
    #: Whether its models are heads of others.
    head: bool = False


UNKNOWN = Family(why="belongs to no family that PARSE knows")


def family_of(architecture: str) -> Family:
    """The family of a model, by SGLang's name of it in `architectures`."""
    return _families().get(architecture, UNKNOWN)


def reads_images_of(architecture: str) -> bool:
    """Whether requests with images are served by a model."""
    return family_of(architecture).images


@functools.cache
def _families() -> dict[str, Family]:
    names = {f.name for f in fields(Family)}
    return {
        architecture: Family(**{k: v for k, v in row.items() if k in names})
        for row in tomllib.loads(FILE.read_text(encoding="utf-8"))["family"]
        for architecture in row["architectures"]
    }
