"""The servers of some arms, side by side."""

from __future__ import annotations

import contextlib
import logging
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.harness.arms import UNSPECULATIVE_KINDS, Arm, arm_draft, server_flags
from benchmarks.harness.config import BenchConfig
from sglang_parse.demo.servers import DEFAULT_TIMEOUT_S, ServerProcess, running

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def arm_servers(
    arms: Sequence[Arm], config: BenchConfig
) -> Iterator[dict[str, dict[str, str]]]:
    """Fresh servers of some arms, started side by side; yields urls by arm and role.

    A model alone is served once for all of these arms: such a server keeps nothing
    from one cell to the next but its radix cache, which is flushed. Logs stay if a
    server fails.
    """
    logs = Path(tempfile.mkdtemp(prefix="sglang-parse-bench-"))
    servers: dict[tuple[str, str], ServerProcess] = {}
    alone: dict[tuple[str, ...], ServerProcess] = {}
    for arm in arms:
        draft = arm_draft(arm, config.models)
        for role, kind in arm.servers.items():
            flags = server_flags(
                arm,
                kind,
                config.models,
                config.server_args,
                draft,
                judging=config.judging_flags,
            )
            name = f"{arm.name}-{role}"
            server = alone.get(tuple(flags)) or make_server(
                flags, name, logs / f"{name}.log", config.boot_timeout_s
            )
            servers[arm.name, role] = server
            if kind in UNSPECULATIVE_KINDS:
                alone[tuple(flags)] = server
    started = list(dict.fromkeys(servers.values()))
    try:
        with running(started):
            pin_models(started, config.model_cpus)
            yield {
                arm.name: {role: servers[arm.name, role].url for role in arm.servers}
                for arm in arms
            }
        for log in logs.iterdir():
            log.unlink()
    finally:
        with contextlib.suppress(OSError):  # raised where it holds logs
            logs.rmdir()


def make_server(
    flags: list[str], name: str, log: Path, timeout_s: float = DEFAULT_TIMEOUT_S
) -> ServerProcess:
    return ServerProcess(flags, name, log, timeout_s=timeout_s)


def pin_models(servers: Sequence[ServerProcess], cpus: Sequence[int]) -> None:
    """Put the processes that run models on `cpus`, all of them on the same.

    An arm with two servers then has no more hardware than an arm with one. Cores that
    this process may not use are left out.
    """
    allowed = set(cpus) & os.sched_getaffinity(0)
    if not cpus:
        return
    if not allowed:
        logger.warning("model_cpus %s are not ours to use; models run anywhere.", cpus)
        return
    for server in servers:
        for process in server.processes():
            if "sglang::scheduler" not in " ".join(process.cmdline()):
                continue
            for thread in process.threads():
                with contextlib.suppress(ProcessLookupError):
                    os.sched_setaffinity(thread.id, allowed)
