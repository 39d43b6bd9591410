"""What a server's processes hold: memory, threads, files."""

from __future__ import annotations

from dataclasses import dataclass

import psutil

from sglang_parse.demo.servers import descendants


@dataclass(frozen=True)
class Resources:
    """Of the server and all its processes together."""

    #: Bytes of their own. Pages of files, of libraries for the most part, come and go
    #: with the memory that the machine has left.
    memory: int
    threads: int
    files: int
    #: Seconds of all processors together since they began.
    cpu_s: float = 0.0


def resources_of(pid: int) -> Resources:
    """The sum over the process and everything below it."""
    memory = threads = files = 0
    cpu_s = 0.0
    for process in descendants(pid):
        try:
            info = process.memory_info()
            memory += info.rss - info.shared
            threads += process.num_threads()
            files += process.num_fds()
            times = process.cpu_times()
            cpu_s += times.user + times.system
        except psutil.Error:
            continue
    return Resources(memory, threads, files, cpu_s)


def pid_listening_on(port: int) -> int | None:
    """The process of this machine that listens on a port, None if it is not seen."""
    for process in psutil.process_iter():
        try:
            found = process.net_connections(kind="tcp")
        except psutil.Error:
            continue
        listens = psutil.CONN_LISTEN
        if any(c.status == listens and c.laddr.port == port for c in found):
            return process.pid
    return None


def growth(before: Resources, after: Resources, share: float) -> list[str]:
    """What has grown beyond what a busy server needs, one sentence each.

    share: of memory, 0.02 for 2%. Threads and files may differ by a few connections.
    """
    found = []
    if after.memory > before.memory * (1 + share):
        grown = after.memory / before.memory - 1
        found.append(f"memory has grown by {grown:.1%}, expected at most {share:.0%}")
    for name, spare in (("threads", 40), ("files", 40)):
        then, now = getattr(before, name), getattr(after, name)
        if now > then + spare:
            found.append(f"{name}: {now}, expected at most {then} + {spare}")
    return found
