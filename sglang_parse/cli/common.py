"""What several commands do before they start."""

from __future__ import annotations

import signal
from pathlib import Path
from types import FrameType


def check_writable(path: Path, flag: str) -> None:
    """Raise ValueError now rather than lose the results in the end."""
    try:
        is_new = not path.exists()
        with path.open("a", encoding="utf-8"):
            pass
        if is_new:
            path.unlink()  # no empty file is left behind where the run fails
    except OSError as e:
        raise ValueError(
            f"{flag} {str(path)!r} cannot be written ({e.strerror}); give a file in "
            "a folder that exists."
        ) from e


def leave_by_exception() -> None:
    """Have signals that end the command raise KeyboardInterrupt, so that the servers it
    started are stopped. SIGINT too: a shell starts background jobs with it ignored."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _interrupt)


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
