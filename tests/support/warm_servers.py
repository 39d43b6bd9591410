"""Real servers that start from a process which has imported SGLang once.

Nearly all of a server's start is the imports of its three processes: 37 of 40 seconds
of processor time. A warm server is forked from one that has them behind it. Apart from
the start it is the stock server with the same command line.

Tests of starting take `ServerProcess` itself, as users do.
"""

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sglang_parse.demo.servers import ServerProcess
from tests.support.warm_child import MESSAGE_BYTES

# Read where modules are imported, so a server that needs others starts by itself. What
# PYTHONPATH adds is found behind what was imported; the child reads the others again.
IMPORTED = ("SGLANG", "OMP_", "PYTHON", "TORCH", "HF_", "CUDA")
HEALTH = "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION"
READ_LATER = (
    *("PYTHONPATH", "SGLANG_PARSE_CONFIG", HEALTH),
    *("SGLANG_TEST_RETRACT", "SGLANG_TEST_RETRACT_INTERVAL"),
)
MODULE = "sglang.launch_server"


class WarmServer(ServerProcess):
    """A ServerProcess whose imports are done, where its environment allows it.

    It is killed at its end: SGLang takes five seconds to look at a SIGTERM.
    """

    grace_s = 0.0

    def start(self) -> None:
        nursery = the_nursery()
        # Else each GET /health takes SGLang a second; /health_generate still does.
        self._env[HEALTH] = "0"
        if at_import(self._env) != nursery.environment:
            super().start()
            return
        self._started = time.monotonic()
        argv = self._command[self._command.index(MODULE) :]
        self._process = nursery.fork(argv, self._env, str(self.log_path))


class Forked:
    """As much of subprocess.Popen as ServerProcess uses."""

    stdin = None

    def __init__(self, nursery: "Nursery", pid: int) -> None:
        self.nursery, self.pid = nursery, pid
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = self.nursery.ask({"poll": self.pid})
        return self.returncode

    def wait(self) -> int:
        while (code := self.poll()) is None:
            time.sleep(0.05)
        return code


class Nursery:
    """The process that servers are forked from, one for each process of tests."""

    def __init__(self) -> None:
        env = {"OMP_NUM_THREADS": "1", **os.environ}
        self.environment = at_import(env)
        self._ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = (sys.executable, "-m", "tests.support.warm_child")
        self._process = subprocess.Popen(
            [*command, str(theirs.fileno())],
            pass_fds=[theirs.fileno()],
            env=env,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        theirs.close()
        self._lock = threading.Lock()

    def ask(self, message: dict[str, Any]) -> int | None:
        with self._lock:
            self._ours.send(json.dumps(message).encode())
            answer = self._ours.recv(MESSAGE_BYTES)
        if not answer:
            raise RuntimeError(
                "the process that servers fork from has ended; "
                "`python -m tests.support.warm_child 0` shows why it cannot start"
            )
        return json.loads(answer)

    def fork(self, argv: list[str], env: dict[str, str], log: str) -> Forked:
        pid = self.ask({"argv": argv, "env": env, "log": log})
        assert pid is not None
        return Forked(self, pid)

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._ours.close()
        self._process.wait()


def run_script(
    path: Path,
    *args: str,
    log: Path,
    timeout_s: float = 580,
    env: Mapping[str, str] | None = None,
) -> str:
    """What a script wrote to its log that starts behind SGLang's imports. Raises
    AssertionError with it where the script fails or takes too long."""
    whole = {**os.environ, **(env or {})}
    script = the_nursery().fork([str(path), *args], whole, str(log))
    deadline = time.monotonic() + timeout_s
    while script.poll() is None and time.monotonic() < deadline:
        time.sleep(0.1)
    if script.returncode is None:
        os.killpg(script.pid, signal.SIGKILL)
    assert script.returncode == 0, log.read_text()[-3000:]
    return log.read_text()


@functools.cache
def the_nursery() -> Nursery:
    nursery = Nursery()
    atexit.register(nursery.close)
    return nursery


def at_import(env: dict[str, str]) -> dict[str, str]:
    return {
        k: v for k, v in env.items() if k.startswith(IMPORTED) and k not in READ_LATER
    }
