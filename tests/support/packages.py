"""Packages that offer extensions, installed into a folder without a network."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path

#: Group -> name -> object, as in a pyproject.toml.
EntryPoints = Mapping[str, Mapping[str, str]]


def install(
    folder: Path,
    name: str,
    entry_points: EntryPoints,
    modules: Mapping[str, str] | None = None,
    version: str = "1.0",
) -> None:
    """Put metadata and modules (name -> source) where `sys.path` finds them."""
    info = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
    )
    lines = []
    for group, values in entry_points.items():
        lines += [f"[{group}]", *(f"{key} = {value}" for key, value in values.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    for module, source in (modules or {}).items():
        (folder / f"{module}.py").write_text(source)


def install_project(folder: Path, project: Path) -> None:
    """Install the project of a pyproject.toml with modules beside it."""
    about = tomllib.loads((project / "pyproject.toml").read_text())["project"]
    sources = {path.stem: path.read_text() for path in project.glob("*.py")}
    install(folder, about["name"], about["entry-points"], sources, about["version"])
