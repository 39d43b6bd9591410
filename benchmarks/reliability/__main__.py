"""Command line of the fuzzer, the soak and the heavy request. Exit code 1 where
something was found."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from benchmarks.reliability.freeze import Waits, freeze
from benchmarks.reliability.fuzz import Report, fuzz
from benchmarks.reliability.resources import pid_listening_on
from benchmarks.reliability.soak import soak
from sglang_parse.bench.servers import ServerProcess, running
from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH

# Its pool holds a third of what 32 requests of the soak would like to have.
SMALL_POOL = "4096"


def main(argv: list[str] | None = None) -> int:
    args = parse_arguments(argv)
    with servers(args) as (url, target_url):
        report = run(args, url, target_url)
    for line in report.lines():
        sys.stdout.write(line + "\n")
    return 1 if report.findings else 0


def run(args: argparse.Namespace, url: str, target_url: str) -> Report | Waits:
    if args.command == "freeze":
        return freeze(url)
    if args.command == "fuzz":
        return fuzz(
            url,
            seconds=args.seconds,
            num_requests=args.requests,
            seed=args.seed,
            concurrency=args.concurrency,
            target_url=target_url,
        )
    report, slices = soak(
        url,
        seconds=args.minutes * 60,
        seed=args.seed,
        concurrency=args.concurrency,
        pid=pid_listening_on(urlsplit(url).port or 80),
        target_url=target_url,
    )
    for one in slices:
        held = one.held
        told = (
            f"{held.memory / 2**20:.0f} MiB, {held.threads} threads, " if held else ""
        )
        told += f"{held.files} files" if held else ""
        sys.stdout.write(f"{one.rate:.2f} answers a second; {told}\n")
    return report


@contextlib.contextmanager
def servers(args: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """The URLs of the PARSE server and of one of the target alone, "" without."""
    if args.url:
        yield args.url.rstrip("/"), args.target_url.rstrip("/")
        return
    # The scheduler's own tests of retraction and of slots in use.
    os.environ.setdefault("SGLANG_TEST_RETRACT", "1")
    os.environ.setdefault("SGLANG_TEST_RETRACT_INTERVAL", "23")
    common = ("--model-path", str(TARGET_PATH), "--chunked-prefill-size", "256")
    pool = ("--max-total-tokens", args.pool)
    parse = (
        *("--speculative-algorithm", "PARSE"),
        *("--speculative-draft-model-path", str(DRAFT_PATH)),
    )
    with tempfile.TemporaryDirectory() as folder:
        logs = Path(folder)
        ours = ServerProcess((*common, *pool, *parse), "parse", logs / "parse.log")
        target = ServerProcess((*common, *pool), "target", logs / "target.log")
        with running([ours, target]):
            yield ours.url, target.url


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
        command.add_argument(
            "--concurrency", type=int, default=8 if name == "fuzz" else 32
        )
        if name == "fuzz":
            command.add_argument("--seconds", type=float, default=120.0)
            command.add_argument("--requests", type=int, help="end after so many")
        else:
            command.add_argument("--minutes", type=float, default=60.0)
    heavy = commands.add_parser("freeze")
    heavy.add_argument("--url", required=True, help="a PARSE server of a real model")
    heavy.set_defaults(target_url="")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
