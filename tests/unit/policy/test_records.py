"""The records of the policy: each of their fields is both written and read."""

import ast
from collections.abc import Iterator
from pathlib import Path

import sglang_parse

PACKAGE = Path(sglang_parse.__file__).parent
TREES = [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]
POLICY = [ast.parse(path.read_text()) for path in (PACKAGE / "policy").glob("*.py")]


def records() -> Iterator[tuple[str, str]]:
    """(class, field) of each dataclass of the policy."""
    for tree in POLICY:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef) and any(
                "dataclass" in ast.dump(one) for one in node.decorator_list
            ):
                for one in node.body:
                    if isinstance(one, ast.AnnAssign):
                        yield node.name, one.target.id


def test_each_field_is_read_and_written():
    """Red if a field is optimised for, or told, that nobody sets or looks at."""
    read, written = set(), set()
    positional = {}
    fields: dict[str, list[str]] = {}
    for name, field in records():
        fields.setdefault(name, []).append(field)
    for tree in TREES:
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute):
                is_read = isinstance(node.ctx, ast.Load)
                (read if is_read else written).add(node.attr)
            if isinstance(node, ast.AugAssign) and isinstance(
                node.target, ast.Attribute
            ):
                written.add(node.target.attr)
            if isinstance(node, ast.Call):
                written |= {one.arg for one in node.keywords if one.arg}
                if isinstance(node.func, ast.Name) and node.func.id in fields:
                    positional.setdefault(node.func.id, []).append(len(node.args))
            if isinstance(node, ast.AnnAssign) and isinstance(node.value, ast.Call):
                factory = ast.dump(node.value)
                if "default_factory" in factory and isinstance(node.target, ast.Name):
                    written.add(node.target.id)
    for name, nums in positional.items():
        written |= set(fields[name][: max(nums)])
    assert len(fields) > 4
    for name, own in fields.items():
        assert set(own) <= read, (name, set(own) - read)
        assert set(own) <= written, (name, set(own) - written)
