"""Measure the arms of a config on its data sets and write the report.

    python -m benchmarks.harness benchmarks/configs/embedded.yaml [--out FOLDER]

Finished cells stay when a run is interrupted, and the next start continues.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.harness.config import load_config
from benchmarks.harness.run import run_benchmark
from sglang_parse.cli.common import leave_by_exception


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser("benchmarks.harness", description=__doc__)
    parser.add_argument("config", type=Path, metavar="CONFIG.yaml")
    parser.add_argument(
        "--out", type=Path, metavar="FOLDER", help="instead of the file's `out`"
    )
    parser.add_argument(
        "--repeats", type=int, metavar="N", help="instead of the file's `repeats`"
    )
    args = parser.parse_args(argv)
    leave_by_exception()
    try:
        report = run_benchmark(load_config(args.config, args.out, args.repeats))
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, ValueError, OSError) as e:
        print(f"benchmarks.harness: {e}", file=sys.stderr)
        return 1
    print(f"Report: {report}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
