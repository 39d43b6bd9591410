"""Learn a probe, or show what one is bound to (docs/probes.md).

python -m benchmarks.train_probe train --url URL --out FILE
python -m benchmarks.train_probe show FILE
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks.train_probe.training import TrainOptions, run_training
from sglang_parse.cli.common import check_writable
from sglang_parse.demo.load import LoadError
from sglang_parse.probe.linear_probe import ProbeError
from sglang_parse.probe.probe_file import load_probe


def parser() -> argparse.ArgumentParser:
    probe = argparse.ArgumentParser(prog="python -m benchmarks.train_probe")
    actions = probe.add_subparsers(required=True, metavar="ACTION")
    train = actions.add_parser(
        "train", help="learn a probe from the verdicts of a running server"
    )
    train.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    train.add_argument(
        "--out", type=Path, required=True, metavar="FILE", help="the probe to write"
    )
    train.add_argument(
        "--pairs",
        type=Path,
        required=True,
        metavar="FILE",
        help="that the server writes (--speculative-parse-probe-collect)",
    )
    source = train.add_mutually_exclusive_group()
    source.add_argument(
        "--prompts",
        metavar="FILE",
        help="lines of JSON with `prompt`; default: the embedded task",
    )
    source.add_argument(
        "--from-traffic",
        action="store_true",
        help="ask nothing; the pairs are of the server's traffic",
    )
    train.add_argument("--problems", type=int, help="default: 1000")
    train.add_argument(
        "--temperatures", type=float, nargs="+", metavar="T", help="default: 0 1"
    )
    train.add_argument(
        "--segmenters", nargs="+", metavar="NAME", help="default: the server's own"
    )
    train.add_argument("--concurrency", type=int, help="default: 8")
    train.add_argument("--max-new-tokens", type=int)
    train.add_argument(
        "--labels",
        metavar="X",
        help="what is learnt: `question`, its verdicts, or `gold`, the labels of a "
        "data set that has some for prefixes; default: question",
    )
    train.add_argument(
        "--least-agreement",
        type=float,
        metavar="X",
        help="with the question, else nothing is written; default: 0.95",
    )
    train.add_argument(
        "--most-false-accepts",
        type=float,
        metavar="X",
        help="of what the question rejects, else nothing is written; default: 0.1",
    )
    train.add_argument("--seed", type=int)
    train.add_argument("--api-key", help="the server's admin key, or its API key")
    train.set_defaults(command=train_command)
    show = actions.add_parser("show", help="print what a probe is bound to")
    show.add_argument("file", type=Path)
    show.set_defaults(command=show_command)
    return probe


def train_command(args: argparse.Namespace) -> None:
    values = {k: v for k, v in vars(args).items() if v is not None and k != "command"}
    for name in ("temperatures", "segmenters"):
        if name in values:
            values[name] = tuple(values[name])
    options = TrainOptions(**values | {"url": args.url.rstrip("/")})
    check_writable(args.out, "--out")
    print(run_training(options))


def show_command(args: argparse.Namespace) -> None:
    try:
        probe = load_probe(args.file)
    except ProbeError as e:
        raise ValueError(f"{args.file} {e}.") from e
    found = {
        **asdict(probe.learnt),
        "layers": probe.layers,
        "cutoffs": dict(probe.cutoffs),
        "figures": dict(probe.figures),
    }
    print(json.dumps(found, indent=2))


def main(argv: Sequence[str] | None = None) -> None:
    args = parser().parse_args(argv)
    try:
        args.command(args)
    except (ValueError, LoadError) as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
