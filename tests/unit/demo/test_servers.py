"""ServerProcess with stand-ins for the server: it comes up, dies, hangs, is stopped."""

import os
import subprocess
import sys
import textwrap
import time

import psutil
import pytest

from sglang_parse.demo.servers import (
    ServerError,
    ServerProcess,
    free_port,
    running,
    server_command,
    server_env,
)

# Answers every GET with 200 and has a child, as SGLang's server has.
FAKE_SERVER = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200); self.end_headers()
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def is_gone(process):
    """Ended; an orphan may stay a zombie where nobody reaps it."""
    try:
        return process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


def are_gone(family, timeout_s=20.0):
    """A killed process ends when the kernel comes to it, not when kill() returns."""
    deadline = time.monotonic() + timeout_s
    while not all(map(is_gone, family)):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def make_server(tmp_path, script, *args, **kwargs):
    command = [sys.executable, "-c", textwrap.dedent(script), *args]
    log = tmp_path / "server.log"
    return ServerProcess([], "fake", log, command=command, **kwargs)


def make_fake(tmp_path, script=FAKE_SERVER):
    port = free_port()
    server = make_server(tmp_path, script, str(port))
    server.port, server.url = port, f"http://127.0.0.1:{port}"
    return server


def test_early_death_is_told_with_the_end_of_the_log(tmp_path):
    script = "import sys; print('first'); print('ValueError: no such model'); exit(3)"
    server = make_server(tmp_path, script)
    with pytest.raises(ServerError) as caught, server:
        pass
    message = str(caught.value)
    assert message.startswith("The fake server ended after")
    assert "exit code 3" in message and str(server.log_path) in message
    assert message.endswith("first\nValueError: no such model")


def test_server_that_never_answers_is_stopped(tmp_path):
    server = make_server(tmp_path, "import time; time.sleep(600)", timeout_s=0.5)
    with pytest.raises(ServerError, match="did not answer within"), server:
        pass
    assert server.processes() == []


@pytest.mark.parametrize("error", [KeyboardInterrupt, ZeroDivisionError])
def test_server_and_its_children_are_gone_after_an_exception(tmp_path, error):
    with pytest.raises(error), make_fake(tmp_path) as server:
        family = server.processes()
        assert len(family) == 3 and server.ready_s > 0  # with what watches over us
        assert server.cpu_s() > 0
        raise error
    assert are_gone(family)


def test_a_proxy_is_not_asked_for_servers_of_ours(tmp_path, monkeypatch):
    """Red if nothing starts behind a company's proxy."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    with make_fake(tmp_path, FAKE_SERVER) as server:
        assert server.ready_s > 0


def test_server_that_ignores_sigterm_is_killed(tmp_path, monkeypatch):
    monkeypatch.setattr(ServerProcess, "grace_s", 0.5)
    stubborn = "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN)"
    with make_fake(tmp_path, stubborn + FAKE_SERVER) as server:
        family = server.processes()
    assert are_gone(family)


STARTER = """
import sys, time
from pathlib import Path
from sglang_parse.demo.servers import ServerProcess
server = ServerProcess([], "fake", Path(sys.argv[1]), command=sys.argv[2:])
server.start()
time.sleep(600)
"""


def test_nothing_outlives_a_starter_that_is_killed(tmp_path):
    """Red if SIGKILL, at any time, leaves children that do not yet watch over their
    parent: SGLang's do so some seconds after they have begun."""
    log = tmp_path / "log"
    child = 'import time; print("up", flush=True); time.sleep(600)'
    server = (
        f"import subprocess, sys; subprocess.run([sys.executable, '-c', {child!r}])"
    )
    starter = subprocess.Popen(
        [sys.executable, "-c", STARTER, str(log), sys.executable, "-c", server]
    )
    try:
        deadline = time.monotonic() + 60
        while not (log.exists() and "up" in log.read_text()):
            assert starter.poll() is None and time.monotonic() < deadline
            time.sleep(0.05)
        family = psutil.Process(starter.pid).children(recursive=True)
        assert len(family) >= 2
    finally:
        starter.kill()
        starter.wait()
    assert are_gone(family)


def test_running_stops_the_first_when_the_second_dies(tmp_path):
    good = make_fake(tmp_path)
    bad = make_server(tmp_path, "exit(1)")
    bad.log_path = tmp_path / "bad.log"
    before = set(psutil.Process(os.getpid()).children())
    with pytest.raises(ServerError, match="exit code 1"), running([good, bad]):
        pass
    assert good.processes() == [] and bad.processes() == []
    ours = set(psutil.Process(os.getpid()).children()) - before
    assert all(map(is_gone, ours))


def test_free_port_skips_a_taken_one():
    import socket

    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        taken = sock.getsockname()[1]
        with pytest.raises(ServerError, match="No free port"):
            free_port([taken])


def test_free_port_gives_each_once_while_there_are_others():
    """Red if two servers that boot side by side may get one port: they bind it late."""
    ports = range(32752, 32768)
    assert len({free_port(ports) for _ in range(8)}) == 8
    free = free_port(ports)
    assert free_port([free]) == free


def test_processes_side_by_side_are_given_different_ports(tmp_path):
    """Red if test processes, or a benchmark beside them, give two servers one port."""
    ours = free_port()
    ports = f"range({ours}, {ours + 1})"
    code = f"from sglang_parse.demo.servers import free_port; free_port({ports})"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "ServerError: No free port" in other.stderr


def test_command_binds_loopback_and_env_keeps_the_users_threads():
    command = server_command(["--model-path", "m"], 32001)
    assert command[:3] == [sys.executable, "-m", "sglang.launch_server"]
    assert command[-4:] == ["--host", "127.0.0.1", "--port", "32001"]
    on_cpu = {"SGLANG_PARSE_CPU_PLATFORM": "1"}  # stock servers, too
    assert server_env({}, 1) == {"OMP_NUM_THREADS": "1", **on_cpu}
    assert server_env({"OMP_NUM_THREADS": "4"}, 1) == {"OMP_NUM_THREADS": "4", **on_cpu}
