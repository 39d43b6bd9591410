"""The subcommands `bench` and `calibrate` of the console script."""

from __future__ import annotations

import argparse
import signal
from pathlib import Path
from types import FrameType
from typing import Any


def add_commands(commands: Any) -> None:
    """Define both on the parser's subcommands."""
    bench = commands.add_parser(
        "bench", help="measure arms on data sets; see benchmarks/README.md"
    )
    bench.add_argument("config", type=Path, metavar="CONFIG.yaml")
    bench.add_argument(
        "--out", type=Path, metavar="FOLDER", help="instead of the file's `out`"
    )
    bench.set_defaults(command=bench_command)


def bench_command(args: argparse.Namespace) -> int:
    from sglang_parse.bench.config import load_config
    from sglang_parse.bench.run import run_benchmark

    # Leave by an exception, so that the servers are stopped.
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, _interrupt)
    path = run_benchmark(load_config(args.config, args.out))
    print(f"Report: {path}")
    return 0


def _interrupt(signum: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt
