"""Raw results: one JSON line each, written at once, so that a cut run keeps them."""

from __future__ import annotations

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from benchmarks.provenance import shown_path

# Long values, which are in the file and not in the printed line.
HIDDEN = ("samples_ms", "args", "greedy", "ruled")
PACKAGES = ("sglang", "torch", "flashinfer-python", "triton", "sglang-parse")


def provenance() -> dict[str, Any]:
    """Command, commit, versions and machine."""
    import torch

    def found(name: str) -> str | None:
        try:
            return version(name)
        except PackageNotFoundError:
            return None

    def git(*args: str) -> str:
        try:
            done = subprocess.run(["git", *args], capture_output=True, text=True)
        except OSError:  # a lent machine may have none, and has no .git
            return ""
        return done.stdout.strip()

    device: dict[str, Any] = {"cpu": platform.processor() or platform.machine()}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        device["gpu"] = properties.name
        device["gpu_memory_gb"] = round(properties.total_memory / 1e9, 1)
        device["cuda"] = torch.version.cuda
    return {
        "argv": [shown_path(word) for word in sys.argv],
        "commit": git("rev-parse", "--short", "HEAD") or os.environ.get("COMMIT", ""),
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "python": platform.python_version(),
        "versions": {name: found(name) for name in PACKAGES},
        "device": device,
    }


class Records:
    """A JSONL file of one run. Lines of earlier runs are kept and found again."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._source = provenance()
        self._known: dict[str, dict[str, Any]] = {}
        self._failed: list[str] = []
        if path.exists():
            for line in path.read_text().splitlines():
                record = json.loads(line)
                if "error" not in record:
                    self._known[record["cell"]] = record

    def has(self, cell: str) -> bool:
        """Whether the cell was measured before (by this run or one it resumes)."""
        return cell in self._known

    def find(self, cell: str) -> dict[str, Any] | None:
        """The record of a cell that was measured, None of another one."""
        return self._known.get(cell)

    def add(self, stage: str, cell: str, **values: Any) -> None:
        record = {
            "stage": stage,
            "cell": cell,
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **values,
            "source": self._source,
        }
        with open(self.path, "a", encoding="utf-8") as f:
            f.write(json.dumps(record) + "\n")
        self._known[cell] = record
        if "error" in values:
            self._failed.append(cell)
        shown = {k: v for k, v in values.items() if k not in HIDDEN}
        print(f"{stage} {cell}: {json.dumps(shown)}", flush=True)

    def exit_on_errors(self) -> None:
        """End the process with status 1 if a cell of this run failed."""
        if self._failed:
            sys.exit(f"cells that failed: {', '.join(self._failed)}")


def spread(samples: Sequence[float]) -> dict[str, float]:
    """Median, least and greatest."""
    return {
        "median": statistics.median(samples),
        "min": min(samples),
        "max": max(samples),
    }


def timed(
    work: Callable[[], Any],
    synchronize: Callable[[], None],
    *,
    repeats: int,
    warmup: int,
) -> list[float]:
    """Milliseconds of each repeat, the device idle before and after it."""
    for _ in range(warmup):
        work()
    samples = []
    for _ in range(repeats):
        synchronize()
        start = time.perf_counter()
        work()
        synchronize()
        samples.append(1000 * (time.perf_counter() - start))
    return samples


class Clock:
    """Time left of a budget."""

    def __init__(self, budget_s: float) -> None:
        self._end = time.monotonic() + budget_s

    def left_s(self) -> float:
        return self._end - time.monotonic()
