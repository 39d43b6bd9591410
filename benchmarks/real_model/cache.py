"""Folders of the user's cache that are built once, whole or not at all."""

from __future__ import annotations

import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from benchmarks.real_model.wheel import ModelError


def cache_folder(environment: Mapping[str, str] = os.environ) -> Path:
    """`sglang-parse` in XDG_CACHE_HOME, which counts only as an absolute path."""
    given = environment.get("XDG_CACHE_HOME", "")
    base = Path(given) if given.startswith("/") else Path.home() / ".cache"
    return base / "sglang-parse"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the lock file of `folder`, which is made; waits for another holder.

    The system drops the lock of a process that dies. Raises ModelError where the
    folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as e:
        raise ModelError(
            f"{folder} cannot be written ({e.strerror}); set XDG_CACHE_HOME to a "
            "folder that can."
        ) from e
    with lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def build_folder(folder: Path, build: Callable[[Path], None]) -> None:
    """`build` fills a folder beside `folder`, which it then becomes in one step.

    For holders of the lock. What a process that died has left there is removed.
    """
    for left in folder.parent.glob(f".{folder.name}-*"):
        shutil.rmtree(left, ignore_errors=True)
    unfinished = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        build(unfinished)
        unfinished.chmod(0o755)
        unfinished.rename(folder)
    except BaseException:
        shutil.rmtree(unfinished, ignore_errors=True)
        raise


def check_room(folder: Path, num_bytes: int) -> None:
    """Raise ModelError unless the disk of `folder` has `num_bytes` left."""
    free = shutil.disk_usage(folder).free
    if free < num_bytes:
        raise ModelError(
            f"{folder} has {free >> 20} MB left, expected {num_bytes >> 20} MB; free "
            "some, or set XDG_CACHE_HOME to a folder on another disk."
        )
