"""The origin of a measurement: command, code, versions and machine."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("sglang", "torch", "transformers", "sglang-parse")


def provenance() -> dict[str, Any]:
    """Command line, git commit, versions and machine, as plain JSON."""
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
    """A word of a command line without the folders of this machine: a path inside the
    repository becomes relative to it, other paths keep only their last part."""
    flag, equals, value = word.rpartition("=")
    path = Path(value)
    if not (path.is_absolute() or ".." in path.parts):
        return word
    path = path.resolve()
    is_inside = path.is_relative_to(REPOSITORY)
    shown = str(path.relative_to(REPOSITORY)) if is_inside else path.name
    return f"{flag}{equals}{shown}"


_DESCRIBE = ("describe", "--always", "--dirty", "--exclude", "*")


def gpu_names() -> list[str]:
    """The names of this machine's CUDA devices, from nvidia-smi."""
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
