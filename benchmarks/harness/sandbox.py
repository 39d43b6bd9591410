"""Run generated programs in a subprocess with limits.

Limits of processor time, memory, file size and number of processes, an empty working
folder, an empty environment, isolated Python, no inherited files, and no network where
the kernel lets us take it away. It keeps a wrong program from doing harm by accident;
it is no jail for a hostile one: run untrusted models in a container.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import resource
import signal
import subprocess
import sys
import tempfile
from dataclasses import dataclass

CPU_S = 20
WALL_S = 60
MEMORY_BYTES = 4 << 30
FILE_BYTES = 16 << 20
NUM_PROCESSES = 64
LAST_BYTES = 4096  # of what a program says about its end
_LIBC = ctypes.CDLL(None, use_errno=True)
_CLONE_NEWUSER, _CLONE_NEWNET = 0x10000000, 0x40000000  # linux/sched.h


@dataclass(frozen=True)
class Verdict:
    """passed: the program ran to its last line. reason: "" or why not."""

    passed: bool
    reason: str = ""


def run_program(source: str, *, cpu_s: int = CPU_S, wall_s: float = WALL_S) -> Verdict:
    """Run a Python program; its output is thrown away but for the last error line.

    A program that leaves by itself, before its last line, has not passed.
    """
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)  # a child that got away may hold the other end
    with (
        os.fdopen(read_end, "rb", buffering=0) as reports,
        tempfile.TemporaryDirectory(prefix="sglang-parse-sandbox-") as folder,
        tempfile.TemporaryFile() as errors,  # a pipe has no limit of size
    ):
        try:
            process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _LOADER, str(write_end)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
                cwd=folder,
                env={"PATH": "/usr/bin:/bin", "HOME": folder, "OMP_NUM_THREADS": "1"},
                start_new_session=True,
                pass_fds=(write_end,),
                preexec_fn=lambda: _limit(cpu_s),
            )
        finally:
            os.close(write_end)
        try:
            process.communicate(_with_packages(source), timeout=wall_s)
        except subprocess.TimeoutExpired:
            return Verdict(False, f"ran longer than {wall_s:g} s")
        finally:
            _kill_group(process)
        reached_end = reports.read(1) == b"."
        errors.seek(-min(errors.seek(0, os.SEEK_END), LAST_BYTES), os.SEEK_END)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    if process.returncode == 0 and reached_end:
        return Verdict(True)
    if process.returncode == 0:
        return Verdict(False, "left before its last line")
    if process.returncode < 0:
        return Verdict(False, signal.Signals(-process.returncode).name)
    return Verdict(False, lines[-1][:200] if lines else "no message")


# The program arrives on standard input, which it then finds empty. Site packages are
# put back: the tests of MBPP+ use numpy. It is no main module, so that what an answer
# does when it is run as one does not come before the tests.
_LOADER = """
import io, json, os, sys
data = json.loads(sys.stdin.buffer.read())
sys.stdin = io.StringIO()
sys.path += data["path"]
exec(compile(data["source"], "<program>", "exec"), {"__name__": "solution"})
os.write(int(sys.argv[1]), b".")
"""


def _with_packages(source: str) -> bytes:
    # Debian's own Python has its packages in dist-packages.
    folders = [p for p in sys.path if p.endswith(("site-packages", "dist-packages"))]
    return json.dumps({"source": source, "path": folders}).encode()


def _limit(cpu_s: int) -> None:
    """In the child, before it becomes Python."""
    for what, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, MEMORY_BYTES),
        (resource.RLIMIT_FSIZE, FILE_BYTES),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_NPROC, NUM_PROCESSES),
    ):
        _, hard = resource.getrlimit(what)
        limit = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(what, (limit, limit))
    if sys.platform == "linux":
        # Best effort: not every kernel lets a plain user make namespaces.
        _LIBC.unshare(_CLONE_NEWUSER | _CLONE_NEWNET)


def _kill_group(process: subprocess.Popen[bytes]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    if process.stdin:
        process.stdin.close()
