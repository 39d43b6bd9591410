"""What a pair costs on this machine, as a table for the simulator.

    python -m benchmarks.bench_modes --arms semantic exact off \
        --concurrency 1 8 32 --logs logs --out rounds.jsonl
    python -m benchmarks.simulate.measure logs/parse.log --out cpu-embedded.json

A PARSE server logs its rounds at level debug. Straight lines are fitted to their times.
The slowest are left out, a tenth as a rule: a neighbour held these up. Rounds of single
requests in exact mode also say how often the target leaves the draft. A GPU works while
Python goes on, and a stage may wait for one before it: what follows the drafts is
fitted as a whole.
"""

from __future__ import annotations

import argparse
import ast
import json
import platform
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

MARK = "PARSE round: "
Rounds = list[dict[str, float]]


def read_rounds(path: Path) -> Rounds:
    """The rounds in a server's log."""
    lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    found = (line.partition(MARK)[2] for line in lines)
    return [ast.literal_eval(text) for text in found if text.startswith("{")]


def fit(
    columns: Sequence[Sequence[float]], ms: Sequence[float], keep: float
) -> list[float]:
    """Least squares without negative costs, of the fastest share `keep`."""
    x, y = np.array(columns, dtype=float), np.array(ms, dtype=float)
    kept = np.ones(len(y), dtype=bool)
    answer = np.zeros(x.shape[1])
    for _ in range(6):
        answer, *_ = np.linalg.lstsq(x[kept], y[kept], rcond=None)
        answer = np.maximum(answer, 0.0)
        over = y / np.maximum(x @ answer, 1e-6)
        kept = over <= np.quantile(over, keep)
    return [float(a) for a in answer]


def table(rounds: Rounds, keep: float) -> dict[str, float]:
    """Constants of `MeasuredCosts`, in milliseconds."""
    plain = [r for r in rounds if "plain_ms" in r]
    drafted = [r for r in rounds if r["steps"] and not r["token_steps"]]
    passes = [r for r in rounds if "verify_ms" in r and not r["token_steps"]]
    plain_fit = fit(
        [[1, r["bs"]] for r in plain],
        [r["plain_ms"] / r["plain_steps"] for r in plain],
        keep,
    )
    step_fit = fit(
        [[1, r["steps"], r["steps"] * r["bs"], r.get("read", 0)] for r in drafted],
        [r["draft_ms"] for r in drafted],
        keep,
    )
    pass_fit = fit(
        [[1, r["rows"], r["bs"]] for r in passes],
        [r["layout_ms"] + r["verify_ms"] + r["decide_ms"] for r in passes],
        keep,
    )
    return {
        "plain_base": plain_fit[0],
        "plain_request": plain_fit[1],
        "step_base": step_fit[1],
        "step_request": step_fit[2],
        # Catching up writes the first token: it takes the place of a step.
        "catch_up_base": step_fit[0] + step_fit[1],
        "catch_up_token": step_fit[3],
        "pass_base": pass_fit[0],
        "pass_row": pass_fit[1],
        "prefill_base": pass_fit[0],
        "prefill_token": pass_fit[1],
        "host_base": 0.0,  # part of the pass
        "host_request": pass_fit[2],
        "head_base": step_fit[1],
        "between": between_ms(rounds),
    }


def between_ms(rounds: Rounds) -> float:
    """Usual time between two rounds; 0 where the log does not tell it."""
    known = [ms for r in rounds if (ms := r.get("between_ms"))]
    return float(np.median(known)) if known else 0.0


def leaving_rate(rounds: Rounds) -> float:
    """Disagreements for each drafted token that the target was followed along, in
    rounds of one request without verdicts. Raises ValueError where there are none."""
    followed = [
        (r["tokens"] - 1, r["steps"])
        for r in rounds
        if r["bs"] == 1 and not r["judged"] and r["steps"] and not r["token_steps"]
    ]
    left = sum(num < steps for num, steps in followed)
    seen = sum(num + (num < steps) for num, steps in followed)
    if not seen:
        raise ValueError("no round of one request in exact mode; ask at concurrency 1.")
    return left / seen


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("log", type=Path)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument(
        "--keep", type=float, default=0.9, help="fastest share that counts"
    )
    parser.add_argument(
        "--machine", default=f"{platform.machine()}, one thread", help="for the source"
    )
    args = parser.parse_args()
    rounds = read_rounds(args.log)
    if not rounds:
        parser.error(
            f"{args.log} has no rounds; start the server with --log-level debug."
        )
    where = f"{len(rounds)} rounds on {args.machine}"
    source = f"measured: {where}, the fastest {args.keep:.0%}"
    constants: dict[str, Any] = {
        name: {"value": round(value, 4), "source": source}
        for name, value in table(rounds, args.keep).items()
    }
    drafts = {
        "leaving_rate": {"value": round(leaving_rate(rounds), 4), "source": where}
    }
    text = json.dumps({"constants": constants, "drafts": drafts}, indent=2)
    args.out.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
