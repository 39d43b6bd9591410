"""The process that is forked for each warm server; it imports SGLang once.

    python -m tests.support.warm_child FD

It reads a JSON message at a time from the socket FD. `{"argv", "env", "log"}` forks a
program and is answered with its pid; argv begins with a module's name or a script's
path. `{"poll": pid}` is answered with its exit code, or
null while it runs. All servers end when the other end of the socket is closed.
"""

import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import socket
import sys
from importlib import metadata

from uvicorn import _subprocess as uvicorn_processes

MESSAGE_BYTES = 1 << 16


def load_more_plugins(installed: set[str]) -> None:
    """Load the plugins that a server's own PYTHONPATH adds to the `installed` ones.
    Raises ValueError where they hook what is hooked already: SGLang skips that."""
    from sglang.srt.plugins import GENERAL_PLUGINS_GROUP
    from sglang.srt.plugins.hook_registry import HookRegistry

    before = {target: len(hooks) for target, hooks in HookRegistry._hooks.items()}
    for entry in metadata.entry_points(group=GENERAL_PLUGINS_GROUP):
        if entry.name not in installed:
            entry.load()()
    for target, hooks in HookRegistry._hooks.items():
        if before.get(target, len(hooks)) != len(hooks):
            raise ValueError(f"{target} is hooked twice, start another kind of server")
    HookRegistry.apply_hooks()


def plugin_names() -> set[str]:
    from sglang.srt.plugins import GENERAL_PLUGINS_GROUP

    return set(metadata.entry_points(group=GENERAL_PLUGINS_GROUP).names)


def read_again() -> None:
    """Set what SGLang reads from the environment where it is imported."""
    from sglang.srt.environ import envs
    from sglang.srt.managers import scheduler

    scheduler.TEST_RETRACT = envs.SGLANG_TEST_RETRACT.get()
    scheduler.TEST_RETRACT_INTERVAL = envs.SGLANG_TEST_RETRACT_INTERVAL.get()


def serve(argv: list[str], env: dict[str, str], log: str) -> None:
    """Become the program, which runs as `__main__`. SGLang forks its processes.

    SGLang asks for the start method "spawn", which would import all again.
    """
    os.setsid()
    out = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
    for source, number in ((os.open(os.devnull, os.O_RDONLY), 0), (out, 1), (out, 2)):
        os.dup2(source, number)
    os.environ.clear()
    os.environ.update(env)
    installed = plugin_names()
    more = env.get("PYTHONPATH", "").split(os.pathsep)
    sys.path[1:1] = [path for path in more if path and path not in sys.path]
    load_more_plugins(installed)
    multiprocessing.set_start_method("fork", force=True)
    multiprocessing.set_start_method = lambda method, force=False: None
    uvicorn_processes.spawn = multiprocessing.get_context("fork")
    read_again()
    sys.argv = argv
    if argv[0].endswith(".py"):
        runpy.run_path(argv[0], run_name="__main__")
    else:
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)


def fork(message: dict, ours: socket.socket) -> int:
    pid = os.fork()
    if pid:
        return pid
    ours.close()
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    code = 1
    try:
        # What SGLang's main process handles before it forks is not its children's.
        os.register_at_fork(
            after_in_child=lambda: signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        )
        serve(message["argv"], message["env"], message["log"])
        code = 0
    except SystemExit as e:
        if isinstance(e.code, str):
            sys.stderr.write(f"{e.code}\n")
        code = e.code if isinstance(e.code, int) else int(e.code is not None)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        with contextlib.suppress(OSError, ValueError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)


def main() -> None:
    ours = socket.socket(fileno=int(sys.argv[1]))
    import tests.support.preloaded  # noqa: F401

    codes: dict[int, int | None] = {}  # exit codes by pid; None while it runs

    def reap(*_: object) -> None:
        # At once: who waits for a server's end waits until its pid is gone.
        for pid in [pid for pid, code in codes.items() if code is None]:
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)

    signal.signal(signal.SIGCHLD, reap)
    while data := ours.recv(MESSAGE_BYTES):
        message = json.loads(data)
        if "poll" in message:
            answer = codes[message["poll"]]
        else:
            answer = fork(message, ours)
            codes[answer] = None
            reap()
        ours.send(json.dumps(answer).encode())
    for pid in [pid for pid, code in codes.items() if code is None]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(pid, signal.SIGKILL)


if __name__ == "__main__":
    main()
