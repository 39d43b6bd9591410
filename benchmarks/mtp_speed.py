"""Does exact mode with an MTP head ever cost time? Tiny models with random weights.

    python -m benchmarks.mtp_speed --prompts 96 --repeats 5 --out FILE

For each family an engine of the target alone and one of PARSE with the target's own
head, with adaptive windows, take turns. Their heads are right now and then, so most of
what is measured is what PARSE costs where it gains little. Prints output tokens a
second over the target alone at each concurrency: the median of the repeats, with the
lowest and the highest. Then the same of tokens a second of CPU time, which other
programs on the machine stretch less.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import psutil

from benchmarks.provenance import provenance
from tests.support.tiny_engine import TinyEngine
from tests.support.tiny_mtp import NAMES, build_with_mtp

ANSWER_TOKENS = 96
PARSE = (
    *("--speculative-algorithm", "PARSE", "--speculative-parse-compose", "mtp"),
    *("--speculative-parse-mode", "exact"),
)
POOL = ("--max-total-tokens", "8192", "--max-running-requests", "32")
ARMS = {"target": (), "mtp": PARSE}
KINDS = "tok_s", "tok_cpu_s"


def prompts_of(num: int) -> list[list[int]]:
    return [[3 + (7 * i + 5 * k) % 90 for k in range(24)] for i in range(num)]


def measure_once(engine: TinyEngine, concurrency: int, num: int) -> dict[str, float]:
    """Tokens a second, and tokens a second of the schedulers' CPU time."""
    started, cpu_s = time.perf_counter(), used_cpu_s(engine)
    answers = engine.run(prompts_of(num), concurrency, max_new_tokens=ANSWER_TOKENS)
    tokens = sum(len(a.ids) for a in answers)
    return {
        "tok_s": tokens / (time.perf_counter() - started),
        "tok_cpu_s": tokens / (used_cpu_s(engine) - cpu_s),
    }


def used_cpu_s(engine: TinyEngine) -> float:
    times = [psutil.Process(child.pid).cpu_times() for child in engine.children]
    return sum(t.user + t.system for t in times)


def measure(family: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    rows = []
    with tempfile.TemporaryDirectory(prefix="sglang-parse-mtp-") as folder:
        path = Path(folder) / "target"
        build_with_mtp(family, path)
        engines = {
            arm: TinyEngine(
                ["--model-path", str(path), *POOL, *flags],
                log=str(Path(folder) / f"{arm}.log"),
            )
            for arm, flags in ARMS.items()
        }
        try:
            for concurrency in args.concurrency:
                num = max(args.prompts, 2 * concurrency)
                for engine in engines.values():
                    measure_once(engine, concurrency, num)  # warms up
                for repeat in range(args.repeats):
                    turns = list(ARMS) if repeat % 2 else list(ARMS)[::-1]
                    one = {
                        arm: measure_once(engines[arm], concurrency, num)
                        for arm in turns
                    }
                    kinds = {kind: {a: one[a][kind] for a in ARMS} for kind in KINDS}
                    rows.append({"family": family, "concurrency": concurrency} | kinds)
                told(rows[-args.repeats :])
        finally:
            for engine in engines.values():
                engine.close()
    return rows


def told(rows: list[dict[str, Any]]) -> None:
    cells = [str(rows[0]["family"]), str(rows[0]["concurrency"])]
    for kind in KINDS:
        ratios = [row[kind]["mtp"] / row[kind]["target"] for row in rows]
        cells.append(f"{statistics.median(ratios):.2f}")
        cells.append(f"{min(ratios):.2f} to {max(ratios):.2f}")
    print(f"| {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="JSON Lines")
    parser.add_argument("--families", nargs="+", choices=NAMES, default=list(NAMES)[:4])
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rows = [row for family in args.families for row in measure(family, args)]
    if args.out:
        lines = [json.dumps(row | {"provenance": provenance()}) for row in rows]
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
