"""Does exact mode with an MTP head ever cost time? Tiny models with random weights.

    python -m benchmarks.mtp_speed --prompts 96 --repeats 5 --out FILE

For each family an engine of the target alone and one of PARSE with the target's own
head, with adaptive windows, take turns. Their heads are right now and then, so most of
what is measured is what PARSE costs where it gains little. Prints output tokens a
second over the target alone at each concurrency: the median of the repeats, with the
lowest and the highest.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from sglang_parse.bench.provenance import provenance
from tests.support.tiny_engine import TinyEngine
from tests.support.tiny_mtp import NAMES, build_with_mtp

ANSWER_TOKENS = 96
PARSE = (
    *("--speculative-algorithm", "PARSE", "--speculative-parse-compose", "mtp"),
    *("--speculative-parse-mode", "exact"),
)
POOL = ("--max-total-tokens", "8192", "--max-running-requests", "32")
ARMS = {"target": (), "mtp": PARSE}


def prompts_of(num: int) -> list[list[int]]:
    return [[3 + (7 * i + 5 * k) % 90 for k in range(24)] for i in range(num)]


def tokens_a_second(engine: TinyEngine, concurrency: int, num: int) -> float:
    started = time.perf_counter()
    answers = engine.run(prompts_of(num), concurrency, max_new_tokens=ANSWER_TOKENS)
    return sum(len(a.ids) for a in answers) / (time.perf_counter() - started)


def measure(family: str, args: argparse.Namespace) -> list[dict[str, object]]:
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
                    tokens_a_second(engine, concurrency, num)  # warms up
                for repeat in range(args.repeats):
                    turns = list(ARMS) if repeat % 2 else list(ARMS)[::-1]
                    one = {
                        arm: tokens_a_second(engines[arm], concurrency, num)
                        for arm in turns
                    }
                    rows.append(
                        {"family": family, "concurrency": concurrency, "tok_s": one}
                    )
                told(rows[-args.repeats :])
        finally:
            for engine in engines.values():
                engine.close()
    return rows


def told(rows: list[dict[str, object]]) -> None:
    ratios = [r["tok_s"]["mtp"] / r["tok_s"]["target"] for r in rows]  # type: ignore[index]
    family, concurrency = rows[0]["family"], rows[0]["concurrency"]
    middle, least, most = statistics.median(ratios), min(ratios), max(ratios)
    print(
        f"| {family} | {concurrency} | {middle:.2f} | {least:.2f} to {most:.2f} |",
        flush=True,
    )


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
