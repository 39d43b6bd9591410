"""The page docs/matrix.md: what tests run by family, mode and feature, what they run
together or see refused, and what a card saw.

    python -m docs.matrix [--write]      (from the repository's root)

Rows are the tests that there are, modes those that their source names, and pairs of
features those of their marks `combines` and `refuses`. "Seen on a card" comes from the
records of benchmarks/gpu under benchmarks/results: cells without an error whose machine
had a GPU, and tests that passed in their JUnit files. Nothing of it is written by hand.
"""

from __future__ import annotations

import ast
import inspect
import json
import os
import re
import runpy
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "matrix.md"
FOLDERS = ("tests/integration", "tests/gpu")
FAMILIES = ("tests/integration/test_models.py", "tests/integration/test_images.py")
SCALE = "SGLANG_PARSE_TEST_SCALE"
# What the tests of a family are about, by how their names begin.
ASPECTS = {
    "exact tokens": re.compile("test_exact_mode"),
    "a hostile draft": re.compile("test_a_hostile"),
    "verdicts": re.compile("test_scores"),
    "cached prefixes": re.compile("test_cached"),
    "aborts": re.compile("test_aborted"),
    "images": re.compile("test_prompts_with_images"),
}
MODES = ("semantic", "exact", "off")
# Of a request, or of its report, where something is judged.
JUDGED = re.compile("parse_(threshold|judge|recover|segmenter)|judged_")
FEATURES = (
    *("draft in text", "head", "probe", "grammar", "images", "tensor parallelism"),
    *("radix cache", "pages", "hierarchical cache"),
    *("LoRA", "PD disaggregation", "DP attention"),
)
# What tests write for a mark in rows of parameters.
SHORT = {"refuses": "refused"}
# Families of the pairs that a card ran, by the model type of the target.
TYPES = {"gemma3_text": "gemma3"}
HEAD = """# What the tests run

This page is written by `python -m docs.matrix --write`, and a test holds it to the
tests that there are. They pass on a CPU; `make test` runs some of the families, and
`SGLANG_PARSE_TEST_SCALE=1` all. "Seen on a card" comes from the records of
`benchmarks/results` alone: the attention backend, and the arms or fast paths that ran
there. Weights were random, except those of the embedded pair (`llama`). A test counts
as seen where the record of a run names it; runs before 29 November 2026 kept no names.

Modes are those of the requests that the tests send, as their source names them.
"""
TOGETHER = """
## Features together

"served" names the number of tests that use both and compare the answers with the
target's or a witness's; "refused" means that a test sees the sentence that ends the
start. "untried" pairs may be served, but no test says so. On the diagonal, what is
refused is refused by itself, and so beside everything. "head" is an EAGLE-3 head or
an MTP head.
"""


def families() -> dict[str, set[str]]:
    """Family to the names of its tests, where all families run."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    before = os.environ.get(SCALE)
    os.environ[SCALE] = "1"
    try:
        module, images = (runpy.run_path(str(ROOT / file)) for file in FAMILIES)
    finally:
        os.environ.pop(SCALE)
        if before is not None:
            os.environ[SCALE] = before
    for name, test in module.items():
        if name.startswith("test_"):
            marks = {m.args[0]: m.args[1] for m in getattr(test, "pytestmark", ())}
            takes_all = "served" in inspect.signature(test).parameters
            usual = module["CASES"] if takes_all else ()
            for family in marks.get("served", marks.get("name", usual)):
                found[family].add(name)
    for family in images["NAMES"]:
        found[family].add("test_prompts_with_images")
    return found


def tests_in(file: Path) -> dict[str, str]:
    """Test to its source, with its decorators."""
    text = file.read_text()
    lines = text.splitlines()
    return {
        node.name: "\n".join(
            lines[
                min(d.lineno for d in [node, *node.decorator_list])
                - 1 : node.end_lineno
            ]
        )
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test_")
    }


def modes_in(source: str) -> str:
    """The modes that a test or a file names; `semantic` is the default of servers."""
    named = {m for m in MODES if f'"{m}"' in source}
    if JUDGED.search(source) or not named:
        named.add("semantic")
    return ", ".join(m for m in MODES if m in named)


def models_in(source: str) -> str:
    """Whose servers a file's tests ask."""
    return "tiny families" if "support.tiny_" in source else "embedded pair"


def pairs_of(mark: str) -> Counter[frozenset[str]]:
    """How many tests have each set of features of a mark, by pair, or by one alone."""
    found: Counter[frozenset[str]] = Counter()
    for file in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and re.fullmatch(
                f"pytest.mark.{mark}|{SHORT.get(mark)}", ast.unparse(node.func)
            ):
                words = {c.value for c in ast.walk(node) if isinstance(c, ast.Constant)}
                named = sorted(words.intersection(FEATURES))
                is_passed_on = any(isinstance(a, ast.Starred) for a in node.args)
                assert named or is_passed_on, f"{file.name}: {ast.unparse(node)}"
                if len(named) == 1:
                    found[frozenset(named)] += 1
                for pair in combinations(named, 2):
                    found[frozenset(pair)] += 1
    return found


def together() -> list[str]:
    """The table of features by features."""
    served, refused = pairs_of("combines"), pairs_of("refuses")
    alone = [name for name in FEATURES if refused[frozenset([name])]]
    lines = [row(["", *FEATURES]), row(["---"] * (len(FEATURES) + 1))]
    for one in FEATURES:
        cells = []
        for other in FEATURES:
            pair = frozenset((one, other))
            if refused[pair] or one in alone or other in alone:
                cells.append("refused")
            elif one == other:
                cells.append("served")
            else:
                cells.append(f"served: {served[pair]}" if served[pair] else "untried")
        lines.append(row([f"**{one}**", *cells]))
    return lines


def seen_cells(lines: Iterable[str]) -> dict[str, set[str]]:
    """Pair to "backend: what ran", of the records of a card."""
    found: defaultdict[str, set[str]] = defaultdict(set)
    for row in map(json.loads, lines):
        gpu = row.get("source", {}).get("device", {}).get("gpu")
        pair, *rest = row.get("cell", "").split("/")
        if not gpu or "error" in row or row.get("reason"):
            continue
        flags = row.get("args", ())
        at = "--attention-backend"
        backend = flags[flags.index(at) + 1] if at in flags else row.get("backend")
        if row["stage"] == "proof":  # PAIR/BACKEND/proof/PATH
            backend, what = rest[0], rest[-1]
        else:
            what = row.get("arm", row["stage"])
        found[pair].add(f"{gpu.removeprefix('NVIDIA ')}, {backend}: {what}")
    return found


def seen_tests(file: Path) -> set[str]:
    """Ids of the tests that passed in a JUnit file."""
    return {
        f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
        for case in ElementTree.parse(file).iter("testcase")
        if not len(case)
    }


def records() -> tuple[dict[str, set[str]], set[str]]:
    """What the committed records say: cells by family, and ids of tests."""
    from benchmarks.gpu.pairs import CONFIGS, PAIRS, TINY_CONFIGS, TINY_PAIRS

    cells: defaultdict[str, set[str]] = defaultdict(set)
    folder = ROOT / "benchmarks" / "results"
    for file in sorted(folder.glob("gpu*/*.jsonl")):
        rows = (x for x in file.read_text().splitlines() if '"stage"' in x)
        for pair, what in seen_cells(rows).items():
            target = (PAIRS | TINY_PAIRS)[pair].target
            kind = (CONFIGS | TINY_CONFIGS)[target]["model_type"] if target else "llama"
            cells[TYPES.get(kind, kind)] |= what
    passed = [seen_tests(file) for file in sorted(folder.glob("gpu*/*.xml"))]
    return cells, set().union(*passed)


def page(
    of_family: Mapping[str, set[str]], cells: Mapping[str, set[str]], passed: set[str]
) -> str:
    """The text of the page."""
    columns = ["Family", "Modes", *ASPECTS, "Seen on a card"]
    lines = [HEAD, "## Families", "", row(columns), row(["---"] * len(columns))]
    sources = {k: v for file in FAMILIES for k, v in tests_in(ROOT / file).items()}
    for family, names in sorted(of_family.items()):
        marks = [
            "yes" if any(map(starts.match, names)) else ""
            for starts in ASPECTS.values()
        ]
        modes = modes_in("".join(sources.get(name, "") for name in names))
        seen = by_backend(cells.get(family, ()))
        lines.append(row([f"`{family}`", modes, *marks, seen]))
    on_card = Counter(name.split("::")[0] for name in passed)
    columns = ["Tests", "About", "Modes", "Models", "Seen on a card"]
    lines += ["", "## Features", "", row(columns), row(["---"] * len(columns))]
    for file in sorted(
        f for folder in FOLDERS for f in ROOT.glob(f"{folder}/test_*.py")
    ):
        source = file.read_text()
        told = ast.get_docstring(ast.parse(source)) or ""
        about = " ".join(told.split("\n\n")[0].split()).rstrip(".")
        num = on_card[str(file.relative_to(ROOT))]
        seen = f"{num} tests" if num else ""
        models = models_in(source)
        lines.append(row([f"`{file.name}`", about, modes_in(source), models, seen]))
    return "\n".join([*lines, TOGETHER, *together()]) + "\n"


def by_backend(cells: Iterable[str]) -> str:
    """Cells, those of one machine and backend together."""
    found: defaultdict[str, list[str]] = defaultdict(list)
    for machine, what in (cell.split(": ") for cell in sorted(cells)):
        found[machine].append(what)
    return "; ".join(f"{place}: {', '.join(what)}" for place, what in found.items())


def row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cell.replace('|', '/') for cell in cells)} |"


def main(args: Sequence[str]) -> int:
    fresh = page(families(), *records())
    if "--write" in args:
        PAGE.write_text(fresh)
    elif PAGE.read_text() != fresh:
        sys.stderr.write("docs/matrix.md is not what python -m docs.matrix writes\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
