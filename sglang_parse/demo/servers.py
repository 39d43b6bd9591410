"""SGLang servers as subprocesses on loopback ports, which are always stopped."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType

import psutil

from sglang_parse.cpu.entry import SWITCH_ENV

HOST = "127.0.0.1"
# Below Linux's range for outgoing connections, which take ports at random.
PORTS = range(32000, 32768)
DEFAULT_TIMEOUT_S = 600.0
POLL_S = 0.25
KILLED_S = 10.0  # killed processes end within it
LOG_LINES = 12
# The shell becomes the server. Beside it runs a process that kills the whole group when
# its standard input closes. Our process holds the other end and never writes to it, so
# it closes when we die, however we die.
KILLED_WITH_US = (
    'exec 3<&0 </dev/null; { read -r _ <&3; kill -KILL 0; } & exec 3<&-; exec "$@"'
)
# Ports that free_port returned. Servers bind theirs seconds later, so until we end a
# UDP socket of the same number tells other processes that the port is taken.
_given: dict[int, socket.socket] = {}


class ServerError(RuntimeError):
    """A server that did not start or ended; the message says why."""


def free_port(ports: Sequence[int] = PORTS) -> int:
    """A port of `ports` without a listener that no process got from here before.

    This process gets a port again only if all others are taken. Raises ServerError if
    none is left.
    """
    for port in sorted(random.sample(ports, len(ports)), key=_given.__contains__):
        with socket.socket() as sock:
            try:
                sock.bind((HOST, port))
            except OSError:
                continue
        if port not in _given:
            mark = socket.socket(type=socket.SOCK_DGRAM)
            try:
                mark.bind((HOST, port))
            except OSError:
                mark.close()
                continue
            _given[port] = mark
        return port
    raise ServerError(
        f"No free port on {HOST} from {ports[0]} to {ports[-1]}; stop a server there."
    )


def server_command(args: Sequence[str], port: int) -> list[str]:
    """The stock server's command line under this interpreter."""
    launch = [sys.executable, "-m", "sglang.launch_server"]
    return [*launch, *args, "--host", HOST, "--port", str(port)]


def log_tail(path: Path, num_lines: int = LOG_LINES) -> str:
    """The last lines of a log that are not empty; "" without a file."""
    try:
        with open(path, encoding="utf-8", errors="replace") as f:
            lines = deque((s.rstrip() for s in f if s.strip()), maxlen=num_lines)
    except OSError:
        return ""
    return "\n".join(lines)


class ServerProcess:
    """Context manager: a server that answers /health inside and has ended outside.

    args: flags of `sglang.launch_server` without host and port. num_threads: OpenMP
    threads; the embedded models are slower with more than one. command: replaces the
    whole command line (tests). Raises ServerError on entry.
    """

    grace_s = 10.0  # between SIGTERM and SIGKILL

    def __init__(
        self,
        args: Sequence[str],
        name: str,
        log_path: Path,
        *,
        num_threads: int = 1,
        timeout_s: float = DEFAULT_TIMEOUT_S,
        command: Sequence[str] | None = None,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self.timeout_s = timeout_s
        self.port = free_port()
        self.url = f"http://{HOST}:{self.port}"
        self.ready_s = 0.0  # seconds from the start until it was ready
        self._command = list(command or server_command(args, self.port))
        self._env = server_env(os.environ, num_threads)
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> ServerProcess:
        self.start()
        try:
            self.wait_ready()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.stop()

    def start(self) -> None:
        """Start the process in its own session, so that Ctrl-C reaches only us."""
        self._started = time.monotonic()
        with open(self.log_path, "wb") as log:
            self._process = subprocess.Popen(
                ["/bin/sh", "-c", KILLED_WITH_US, "sh", *self._command],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=self._env,
                start_new_session=True,
            )

    def wait_ready(self) -> None:
        """Return once /health answers 200. Raises ServerError if it does not."""
        while True:
            self.check_alive()
            elapsed = time.monotonic() - self._started
            if is_healthy(self.url):
                self.ready_s = elapsed
                return
            if elapsed > self.timeout_s:
                raise ServerError(
                    f"The {self.name} server did not answer within "
                    f"{self.timeout_s:.0f} s; {self._log_note()}"
                )
            time.sleep(POLL_S)

    def check_alive(self) -> None:
        """Raise ServerError if the process has ended."""
        code = self._process.poll() if self._process else None
        if code is None:
            return
        how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
        elapsed = time.monotonic() - self._started
        raise ServerError(
            f"The {self.name} server ended after {elapsed:.0f} s with {how}; "
            f"{self._log_note()}"
        )

    def processes(self) -> list[psutil.Process]:
        """The server and its descendants; [] if it does not run."""
        return descendants(self._process.pid) if self._process else []

    def cpu_s(self) -> float:
        """CPU time of all its processes so far."""
        times = (process.cpu_times() for process in self.processes())
        return sum(one.user + one.system for one in times)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL, to the process and all its descendants."""
        family = self.processes()
        process, self._process = self._process, None
        if process is None:
            return
        if self.grace_s:
            _signal_group(process.pid, signal.SIGTERM)
        _, alive = psutil.wait_procs(family, timeout=self.grace_s)
        _signal_group(process.pid, signal.SIGKILL)
        for member in alive:
            with contextlib.suppress(psutil.NoSuchProcess):
                member.kill()
        psutil.wait_procs(alive, timeout=KILLED_S)
        process.wait()
        if process.stdin:
            process.stdin.close()

    def _log_note(self) -> str:
        tail = log_tail(self.log_path) or "(empty)"
        return f"the end of its log {self.log_path}:\n{tail}"


@contextlib.contextmanager
def running(servers: Sequence[ServerProcess]) -> Iterator[None]:
    """All servers, started side by side. None of them runs after the block."""
    with contextlib.ExitStack() as stack:
        for server in servers:
            stack.callback(server.stop)
            server.start()
        for server in servers:
            server.wait_ready()
        yield


def server_env(env: Mapping[str, str], num_threads: int) -> dict[str, str]:
    """`env` for a server, which may be a stock one on a machine without an accelerator.
    What the user has set is kept."""
    return {"OMP_NUM_THREADS": str(num_threads), SWITCH_ENV: "1", **env}


# Servers on this machine are reached without the user's proxy.
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def is_healthy(url: str) -> bool:
    """Whether the server at `url` answers GET /health with 200."""
    try:
        with _DIRECT.open(url + "/health", timeout=30) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def descendants(pid: int) -> list[psutil.Process]:
    """The process and its descendants that still exist."""
    try:
        parent = psutil.Process(pid)
        return [parent, *parent.children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def _signal_group(pid: int, signum: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(pid, signum)
