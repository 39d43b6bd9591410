"""Command line of the fuzzer, the soak and the heavy request. Exit code 1 where
something was found."""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.reliability.freeze import Waits, freeze
from benchmarks.reliability.fuzz import Report, fuzz
from benchmarks.reliability.resources import pid_listening_on
from benchmarks.reliability.soak import Slice, soak
from sglang_parse.demo.servers import ServerProcess, running
from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH

# Its pool holds a third of what 32 requests of the soak would like to have.
SMALL_POOL = "4096"
# Of the fuzzer, where nobody says how long or how much.
FUZZ_SECONDS = 120.0


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    with servers(args) as (server, url, target_url):
        report = run(args, server, url, target_url)
    for line in report.lines():
        sys.stdout.write(line + "\n")
    return 1 if report.findings else 0


def run(
    args: argparse.Namespace, server: ServerProcess | None, url: str, target_url: str
) -> Report | Waits:
    """server: the PARSE server where this program has started it."""
    if args.command == "freeze":
        return freeze(url, args.heavy)
    if args.command == "fuzz":
        return fuzz_in_parts(args, server, url, target_url)
    report, _ = soak(
        url,
        seconds=args.minutes * 60,
        seed=args.seed,
        concurrency=args.concurrency,
        pid=pid_listening_on(urlsplit(url).port or 80),
        target_url=target_url,
        on_slice=tell,
    )
    return report


def fuzz_in_parts(
    args: argparse.Namespace, server: ServerProcess | None, url: str, target_url: str
) -> Report:
    """The requests of a seed, the server being started anew between the parts."""
    num_parts = args.restarts + 1
    total, report = args.requests, Report()
    for part in range(num_parts):
        if part and server is not None:
            server.stop()
            server.start()
            server.wait_ready()
        first = (total or 0) * part // num_parts
        last = (total or 0) * (part + 1) // num_parts
        report += fuzz(
            url,
            seconds=args.seconds / num_parts,
            num_requests=last - first if total else None,
            num_skipped=args.skip + first,
            seed=args.seed + (0 if total else part),
            concurrency=args.concurrency,
            target_url=target_url,
        )
    return report


def tell(part: Slice) -> None:
    """A line at once: a run of an hour may be broken off."""
    sys.stdout.write(part.line() + "\n")
    sys.stdout.flush()


@contextlib.contextmanager
def servers(
    args: argparse.Namespace,
) -> Iterator[tuple[ServerProcess | None, str, str]]:
    """The PARSE server if this program starts it, its URL, and the URL of a server of
    the target alone, "" without."""
    if args.url:
        yield None, args.url.rstrip("/"), args.target_url.rstrip("/")
        return
    # The scheduler's own tests of retraction and of slots in use.
    os.environ.setdefault("SGLANG_TEST_RETRACT", "1")
    os.environ.setdefault("SGLANG_TEST_RETRACT_INTERVAL", "23")
    common = ("--model-path", str(TARGET_PATH), "--chunked-prefill-size", "256")
    pool = ("--max-total-tokens", args.pool)
    parse = (
        *("--speculative-algorithm", "PARSE"),
        *("--speculative-parse-client-options", "all"),
        *("--speculative-draft-model-path", str(DRAFT_PATH)),
        "--enable-metrics",  # what labels belong to
    )
    with contextlib.ExitStack() as stack:
        logs = Path(args.logs or stack.enter_context(tempfile.TemporaryDirectory()))
        logs.mkdir(parents=True, exist_ok=True)
        ours = ServerProcess((*common, *pool, *parse), "parse", logs / "parse.log")
        target = ServerProcess((*common, *pool), "target", logs / "target.log")
        stack.enter_context(running([ours, target]))
        yield ours, ours.url, target.url


def parse_arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reliability")
    commands = parser.add_subparsers(dest="command", required=True)
    for name in ("fuzz", "soak"):
        command = commands.add_parser(name)
        where = command.add_mutually_exclusive_group(required=True)
        where.add_argument("--url", default="", help="a PARSE server that runs")
        where.add_argument(
            "--start", action="store_true", help="start servers of the embedded pair"
        )
        command.add_argument(
            "--target-url", default="", help="a server of the target, for canaries"
        )
        command.add_argument("--seed", type=int, default=1)
        command.add_argument("--pool", default=SMALL_POOL, help="KV slots with --start")
        command.add_argument("--logs", help="folder for the logs, with --start")
        command.add_argument(
            "--concurrency", type=int, default=8 if name == "fuzz" else 32
        )
        if name == "fuzz":
            command.add_argument(
                "--seconds", type=float, help="end after so long (120 by default)"
            )
            command.add_argument(
                "--requests", type=int, help="end after so many, however long it takes"
            )
            command.add_argument(
                "--restarts", type=int, default=0, help="of the server, with --start"
            )
            command.add_argument(
                "--skip", type=int, default=0, help="leave out so many of the seed"
            )
        else:
            command.add_argument("--minutes", type=float, default=60.0)
    heavy = commands.add_parser("freeze")
    heavy.add_argument("--url", required=True, help="a PARSE server of a real model")
    heavy.add_argument("--heavy", type=int, default=1, help="requests side by side")
    heavy.set_defaults(target_url="")
    args = parser.parse_args(argv)
    if args.command == "fuzz" and args.seconds is None:
        args.seconds = math.inf if args.requests else FUZZ_SECONDS
    if args.url and getattr(args, "restarts", 0):
        parser.error("--restarts needs --start: a server that runs is left alone")
    return args


if __name__ == "__main__":
    sys.exit(main())
