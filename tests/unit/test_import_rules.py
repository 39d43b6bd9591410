"""Which module may import which: the direction of docs/architecture.md, by the source.

Data flows one way. A package imports those before it in ORDER, never those behind it.
"""

import ast
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAME = "sglang_parse"
ORDER = (
    "shield", "options", "judging", "sgl", "reporting", "requests", "verify", "cpu",
    "drafting", "remote", "policy", "engine", "client_texts", "probe",
    "proof", "plugin", "embedded", "demo", "calibrate", "cli",
)  # fmt: skip
# The client's side, which shares little with the server's.
FRONTEND = {"frontend", "judging", "options"}
# Everything else works with fakes where SGLang is not installed.
WITH_SGLANG = {
    *("sgl", "verify", "cpu", "drafting", "probe", "proof", "plugin", "frontend"),
    "shield",
}
WITH_SGLANG_TOO = {f"{NAME}.cli.doctor"}
# Packages that import where these are not installed.
REFUSES = {
    "options": ("sglang", "torch", "transformers"),
    "reporting": ("sglang", "torch", "transformers"),
    "judging": ("sglang", "transformers"),
    "policy": ("sglang", "transformers"),
    "engine": ("sglang", "transformers"),
    "client_texts": ("sglang", "transformers"),
}


@dataclass(frozen=True)
class Import:
    """One import statement of the package's source."""

    importer: str
    imported: str
    #: Whether it stands under `if TYPE_CHECKING`, and so never runs.
    is_for_types: bool

    def __str__(self) -> str:
        return f"{self.importer} -> {self.imported}"


def module_name(path: Path) -> str:
    """Dotted name of a source file."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


SOURCES = {module_name(p): p for p in sorted((ROOT / NAME).rglob("*.py"))}


def imports_in(importer: str, tree: ast.AST, for_types: bool = False) -> list[Import]:
    """The imports in a piece of source, those inside functions included."""
    found: list[Import] = []
    for node in ast.iter_child_nodes(tree):
        guard = isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{importer} imports relatively"
            base = str(node.module)
            # A name that is imported from a package may be a module of it.
            names = [
                f"{base}.{alias.name}" if f"{base}.{alias.name}" in SOURCES else base
                for alias in node.names
            ]
        else:
            names = []
            found += imports_in(importer, node, for_types or guard)
        found += [Import(importer, name, for_types) for name in names]
    return found


def all_imports() -> list[Import]:
    """Every import of the package."""
    found: list[Import] = []
    for name, path in SOURCES.items():
        found += imports_in(name, ast.parse(path.read_text(encoding="utf-8")))
    return found


IMPORTS = all_imports()


def package_of(module: str) -> str:
    """The package of a module of ours, "" for those directly in sglang_parse/."""
    parts = module.split(".")
    is_package = len(parts) == 2 and SOURCES.get(module, Path()).name == "__init__.py"
    return parts[1] if len(parts) > 2 or is_package else ""


def own_imports() -> Iterator[Import]:
    """Imports of our modules from packages of ours."""
    for one in IMPORTS:
        if one.imported.split(".")[0] == NAME and package_of(one.importer):
            yield one


def breaks_direction(one: Import) -> bool:
    """Whether a module imports one that stands behind it."""
    importer, imported = package_of(one.importer), package_of(one.imported)
    if not imported:
        return False  # sglang_parse itself: its version
    if importer == "frontend":
        return imported not in FRONTEND
    return imported == "frontend" or ORDER.index(imported) > ORDER.index(importer)


def test_every_package_has_its_place():
    """Red if a new package joins without a place in the order."""
    packages = {package_of(name) for name in SOURCES} - {""}
    assert packages == {*ORDER, "frontend"}


def test_imports_go_one_way():
    """Red if a package imports one that stands behind it, even for types alone."""
    assert [str(one) for one in own_imports() if breaks_direction(one)] == []


def test_the_shield_is_a_room_of_its_own():
    """Red if the shield needs PARSE, or PARSE is written around it."""
    named = [one for one in own_imports() if package_of(one.imported) == "shield"]
    users = {one.importer for one in named if package_of(one.importer) != "shield"}
    others = {package_of(o.imported) for o in own_imports() if ".shield" in o.importer}
    assert others == {"shield"} and 0 < len(users) <= 8


def test_modules_import_in_no_circle():
    """Red if two modules need each other, be it inside a function."""
    edges: dict[str, set[str]] = {}
    for one in IMPORTS:
        if not one.is_for_types and one.imported in SOURCES:
            edges.setdefault(one.importer, set()).add(one.imported)
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join([*path[path.index(module) :], module])
        if module not in done:
            for imported in sorted(edges.get(module, ())):
                visit(imported, (*path, module))
            done.add(module)

    for module in SOURCES:
        visit(module, ())


def test_sglang_is_imported_where_it_may_be():
    """Red if a package that works with fakes starts to need SGLang."""
    assert [
        str(one)
        for one in IMPORTS
        if one.imported.split(".")[0] == "sglang"
        and package_of(one.importer) not in WITH_SGLANG
        and one.importer not in WITH_SGLANG_TOO
    ] == []


@pytest.mark.parametrize(("package", "refused"), REFUSES.items(), ids=REFUSES)
def test_package_imports_where_there_is_no_sglang(package, refused):
    """Red if a module of the package imports SGLang by a detour, or a module of text
    and numbers alone imports torch."""
    modules = [name for name in SOURCES if package_of(name) == package]
    assert modules
    code = (
        "import importlib, sys\n"
        f"REFUSED = {refused!r}\n"
        "class Refuse:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in REFUSED:\n"
        "            raise ImportError(f'{name} is not installed')\n"
        "sys.meta_path.insert(0, Refuse())\n"
        f"for name in {modules!r}: importlib.import_module(name)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
