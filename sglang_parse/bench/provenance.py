"""Where a measurement comes from: command, code, versions, machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("sglang", "torch", "transformers", "sglang-parse")


def provenance() -> dict[str, Any]:
    """argv, git commit, versions, machine, as plain JSON."""
    return {
        "argv": [shown_path(word) for word in sys.argv],
        "commit": _output("git", "-C", str(Path(__file__).parent), *_DESCRIBE),
        "versions": {name: _version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu": _cpu_model(),
        "cpus": os.cpu_count(),
        "gpus": gpu_names(),
        "load_average": os.getloadavg(),
    }


def shown_path(word: str) -> str:
    """A word of a command line without what it says of this machine: a path inside the
    repository relative to it, of paths elsewhere the name, other words as they are."""
    flag, equals, value = word.rpartition("=")
    path = Path(value)
    if not (path.is_absolute() or ".." in path.parts):
        return word
    path = path.resolve()
    is_inside = path.is_relative_to(REPOSITORY)
    shown = str(path.relative_to(REPOSITORY)) if is_inside else path.name
    return f"{flag}{equals}{shown}"


def hub_commit(model: str, revision: str | None = None) -> str:
    """Commit of a hub model as it lies in this machine's cache, for a name or for a
    folder of the cache; "" for other folders and what is not cached."""
    path = Path(model)
    if not path.is_dir():
        from huggingface_hub import try_to_load_from_cache

        try:
            found = try_to_load_from_cache(model, "config.json", revision=revision)
        except ValueError:  # neither a folder nor a hub name
            return ""
        if not isinstance(found, str):
            return ""
        path = Path(found).parent
    return path.name if path.parent.name == "snapshots" else ""


_DESCRIBE = ("describe", "--always", "--dirty", "--exclude", "*")


def gpu_names() -> list[str]:
    """CUDA devices of this machine, as nvidia-smi names them."""
    if not shutil.which("nvidia-smi"):
        return []
    query = ("--query-gpu=name", "--format=csv,noheader")
    return _output("nvidia-smi", *query).splitlines()


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "not installed"


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor()
    names = [s.partition(":")[2].strip() for s in lines if s.startswith("model name")]
    return names[0] if names else platform.processor()


def _output(*command: str) -> str:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
