"""Switches fast paths of a running server off and on again: for measurements alone.

SGLang loads it as a plugin where this folder is on PYTHONPATH. The file that
PARSE_PATHS_OFF names holds the names of paths that are off; it is read before each
quantum, by the one rank of the server.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from sglang_parse.sgl.fast_paths import OFF, FastPaths, PathState

FILE_ENV = "PARSE_PATHS_OFF"


def register() -> None:
    """What SGLang calls in each of its processes."""
    path = os.environ.get(FILE_ENV)
    if path:
        FastPaths.sync = switched(FastPaths.sync, Path(path))  # type: ignore[method-assign]


def switched(sync: Any, file: Path) -> Any:
    """`FastPaths.sync` that first switches off what `file` names."""
    taken: dict[str, PathState] = {}

    def sync_after_switch(paths: FastPaths, ranks: Any) -> None:
        names = file.read_text().split() if file.exists() else []
        for name in [n for n in taken if n not in names]:
            paths.states[name] = taken.pop(name)
        for name in names:
            if name not in taken and name in paths.states:
                taken[name] = paths.states[name]
                paths.states[name] = PathState(OFF, "it is switched off")
        sync(paths, ranks)

    return sync_after_switch
