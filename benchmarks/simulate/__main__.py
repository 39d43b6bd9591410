"""How close does the shipped policy come to the bound, and to the best fixed setting?

Run it from the root of a checkout, with the package and SGLang installed. `regret`
compares the planner in `sglang_parse/policy` with the best fixed setting in the 24
scenarios of `scenarios.py`; `--only "good c=1"` picks the scenarios by name.

    python -m benchmarks.simulate bound --out bound.jsonl
    python -m benchmarks.simulate followed
    python -m benchmarks.simulate regret --oracle oracle.json --out regret.jsonl
    python -m benchmarks.simulate plot bound.jsonl --svg bound.svg

Every figure is simulated: a virtual clock and modelled costs under the shipped engine.
"""

from __future__ import annotations

import argparse
import json
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.simulate.report import (
    bound_row,
    bound_table,
    followed_row,
    followed_table,
    plot_bound,
    regret_row,
    regret_table,
)
from benchmarks.simulate.scenarios import PAIRS, scenarios


def main() -> None:
    args = parser().parse_args()
    args.command(args)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    bound = commands.add_parser("bound", help="share of the bound, pair by pair")
    bound.add_argument("--pairs", nargs="+", choices=list(PAIRS), default=list(PAIRS))
    bound.add_argument("--kept", nargs="+", type=float, default=[0.9, 0.8])
    bound.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    bound.add_argument("--agreement", type=float, default=0.8)
    bound.add_argument(
        "--tokens-a-step", type=float, default=1.0, help="of the draft, by guesses"
    )
    bound.add_argument("--graphs", choices=("on", "off", "both"), default="on")
    bound.add_argument("--seeds", type=int, default=2)
    bound.add_argument("--out", type=Path)
    bound.set_defaults(command=bound_command)
    followed = commands.add_parser("followed", help="exact mode, and by a head alone")
    followed.add_argument(
        "--pairs", nargs="+", choices=list(PAIRS), default=["235b+8b-h100-tp8"]
    )
    followed.add_argument("--concurrency", nargs="+", type=int, default=[1])
    followed.add_argument("--agreement", nargs="+", type=float, default=[0.8])
    followed.add_argument("--steps", type=int, default=5, help="of the head")
    followed.add_argument("--head", choices=("EAGLE-3", "MTP"), default="EAGLE-3")
    followed.add_argument("--out", type=Path)
    followed.set_defaults(command=followed_command)
    regret = commands.add_parser("regret", help="against the best fixed setting")
    regret.add_argument("--only", default="", help="scenarios whose name holds this")
    regret.add_argument("--oracle", type=Path, help="settings found before; kept here")
    regret.add_argument("--out", type=Path)
    regret.set_defaults(command=regret_command)
    plot = commands.add_parser("plot", help="draw the rows of `bound`")
    plot.add_argument("rows", type=Path)
    plot.add_argument("--svg", type=Path, required=True)
    plot.set_defaults(command=plot_command)
    return parser


def bound_command(args: argparse.Namespace) -> None:
    graphs = {"on": [True], "off": [False], "both": [False, True]}[args.graphs]
    rows = []
    for pair in args.pairs:
        for with_graphs in graphs:
            for kept in args.kept:
                for concurrency in args.concurrency:
                    row = bound_row(
                        pair,
                        kept=kept,
                        agreement=args.agreement,
                        concurrency=concurrency,
                        graphs=with_graphs,
                        seeds=args.seeds,
                        tokens_a_step=args.tokens_a_step,
                    )
                    print(bound_table([row], header=not rows), flush=True)
                    rows.append(row)
    write(args.out, rows)


def followed_command(args: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    for pair, concurrency, agreement, graphs, head in product(
        *(args.pairs, args.concurrency, args.agreement),
        *((True, False), (0, args.steps)),
    ):
        row = followed_row(
            pair,
            head=head,
            agreement=agreement,
            concurrency=concurrency,
            graphs=graphs,
            kind=args.head,
        )
        print(followed_table([row], header=not rows), flush=True)
        rows.append(row)
    write(args.out, rows)


def regret_command(args: argparse.Namespace) -> None:
    known: dict[str, Any] = {}
    if args.oracle and args.oracle.exists():
        known = json.loads(args.oracle.read_text(encoding="utf-8"))
    rows = []
    for name, scenario in scenarios().items():
        if args.only not in name:
            continue
        rows.append(regret_row(name, scenario, known))
        print(regret_table(rows[-1:], header=len(rows) == 1), flush=True)
        if args.oracle:
            args.oracle.write_text(json.dumps(known, indent=1), encoding="utf-8")
    regrets = [row["regret"] for row in rows]
    if regrets:
        mean, worst = sum(regrets) / len(regrets), max(regrets)
        print(f"simulated regret: mean {mean:.1%}, worst {worst:.1%}")
    write(args.out, rows)


def plot_command(args: argparse.Namespace) -> None:
    lines = args.rows.read_text(encoding="utf-8").splitlines()
    plot_bound([json.loads(line) for line in lines], args.svg)


def write(path: Path | None, rows: list[dict[str, Any]]) -> None:
    """One JSON object a line."""
    if path is not None:
        text = "".join(json.dumps(row) + "\n" for row in rows)
        path.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
