"""A name stands for one thing: in a stack trace, and where an editor opens a file."""

import ast
from collections import defaultdict
from pathlib import Path

PACKAGE = Path(__file__).parents[2] / "sglang_parse"
MODULES = [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]


def repeated(places: list[tuple[str, Path]]) -> dict[str, list[str]]:
    found: defaultdict[str, list[str]] = defaultdict(list)
    for name, path in places:
        found[name].append(str(path.relative_to(PACKAGE)))
    return {name: paths for name, paths in found.items() if len(paths) > 1}


def test_a_file_name_occurs_once():
    """Red if two modules of the package have the same file name."""
    assert len(MODULES) > 100
    assert not repeated([(path.name, path) for path in MODULES])


def test_a_public_class_name_occurs_once():
    """Red if two modules define a public class of the same name."""
    classes = [
        (node.name, path)
        for path in MODULES
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    ]
    assert len(classes) > 100
    assert not repeated(classes)
