"""`sglang-parse estimate`: what would a pair gain, from its config.json files alone?"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_estimate(commands: Any) -> None:
    """Add the command to the subparsers."""
    parser = commands.add_parser(
        "estimate", help="simulate what a pair would gain on a GPU, without weights"
    )
    parser.add_argument(
        "--target", type=Path, required=True, metavar="CONFIG", help="config.json"
    )
    parser.add_argument(
        "--draft", type=Path, required=True, metavar="CONFIG", help="config.json"
    )
    parser.add_argument(
        "--gpu", choices=("h100", "h200"), default="h200", help="default: h200"
    )
    parser.add_argument(
        "--tp", type=int, choices=(1, 2, 4, 8), default=1, help="cards; default: 1"
    )
    parser.add_argument(
        "--kept",
        type=float,
        default=0.9,
        metavar="X",
        help="share of a draft of 256 tokens that verdicts keep; default: 0.9",
    )
    parser.add_argument(
        "--agreement",
        type=float,
        default=0.8,
        metavar="X",
        help="share of draft tokens that are the target's own; default: 0.8",
    )
    parser.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        default=[1, 8, 32],
        metavar="C",
        help="requests in flight; default: 1 8 32",
    )
    parser.set_defaults(command=estimate_command)


def estimate_command(args: argparse.Namespace) -> int:
    from sglang_parse.bench.estimate import EstimateOptions, estimate

    options = EstimateOptions(
        target=args.target,
        draft=args.draft,
        gpu=args.gpu,
        tp=args.tp,
        kept=args.kept,
        agreement=args.agreement,
        concurrency=tuple(args.concurrency),
    )
    for line in estimate(options):
        print(line, flush=True)
    return 0
