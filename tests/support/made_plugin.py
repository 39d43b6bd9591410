"""Packages with an entry point of SGLang's, as pip would install them."""

import textwrap
from pathlib import Path


def write_plugin(folder: Path, name: str, source: str) -> Path:
    """A plugin `name` whose module has a function `register`; the folder, which belongs
    on PYTHONPATH."""
    folder.mkdir(exist_ok=True)
    (folder / f"{name}.py").write_text(textwrap.dedent(source))
    info = folder / f"{name}-1.0.dist-info"
    info.mkdir()
    project = name.replace("_", "-")
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project}\nVersion: 1.0\n"
    )
    (info / "entry_points.txt").write_text(
        f"[sglang.srt.plugins]\n{name} = {name}:register\n"
    )
    return folder
