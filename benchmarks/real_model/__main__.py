"""The folders of SmolLM2-135M-Instruct, which is fetched once, or its demonstration.

python -m benchmarks.real_model          # unpacks the model and prints its folders
python -m benchmarks.real_model demo     # serves it: exact mode and EAGLE-3
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks.real_model.demo import RealDemoOptions, find_models, run_real_demo
from sglang_parse.cli.common import check_writable, leave_by_exception
from sglang_parse.cli.main import count


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    try:
        if args.command == "demo":
            demo(args)
        else:
            for name, path in vars(find_models()).items():
                print(f"{name} {path}")
    except KeyboardInterrupt:
        return 130
    except (RuntimeError, ValueError, OSError) as e:
        print(f"benchmarks.real_model: {e}", file=sys.stderr)
        return 1
    return 0


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("benchmarks.real_model", description=__doc__)
    demo = parser.add_subparsers(dest="command").add_parser(
        "demo", help="measure exact mode and EAGLE-3 against the target alone"
    )
    demo.add_argument(
        "--problems", type=count, default=16, metavar="N", help="prompts; default: 16"
    )
    demo.add_argument(
        "--concurrency",
        type=count,
        nargs="+",
        default=[1, 4],
        metavar="C",
        help="requests in flight; default: 1 4",
    )
    demo.add_argument("--json", type=Path, metavar="FILE", help="write the figures")
    return parser


def demo(args: argparse.Namespace) -> None:
    if args.json is not None:
        check_writable(args.json, "--json")
    leave_by_exception()
    concurrency = tuple(dict.fromkeys(args.concurrency))
    run_real_demo(RealDemoOptions(args.problems, concurrency, args.json))


if __name__ == "__main__":
    sys.exit(main())
