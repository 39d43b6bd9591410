"""Does the embedded target write the same tokens with PARSE as without it?

    python -m benchmarks.identity --seeds 1 2 3 4 5 6 7 8 --out identity.jsonl

A threshold above 1 rejects every verdict, so drafts are written, judged and followed
token by token, and nothing but the target's own tokens may be left. Stock SGLang, a
PARSE server at threshold 2 and in exact mode answer the same problems. Each seed adds
one line per arm to the file, whose sum is printed.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from sglang_parse.cli.demo_run import DemoOptions, arm_args
from sglang_parse.demo.figures import RequestResult
from sglang_parse.demo.load import encode_prompts, load_tokenizer, measure
from sglang_parse.demo.servers import ServerProcess, running
from sglang_parse.embedded import TARGET_PATH
from sglang_parse.embedded.task import make_problems

ARMS = {
    "threshold 2": {"parse_threshold": 2.0, "parse_mode": "semantic"},
    "exact": {"parse_mode": "exact"},
}
# An adaptive server would learn that no verdict passes, and ask for none.
JUDGING = ("--no-speculative-parse-adaptive", "--speculative-parse-window", "40")


def compared(
    alone: Sequence[RequestResult], ours: Sequence[RequestResult]
) -> dict[str, int]:
    """Counts over the answers to the same problems, and the first that differs."""
    pairs = list(zip(alone, ours, strict=True))
    differing = [i for i, (a, b) in enumerate(pairs) if a.token_ids != b.token_ids]
    reports = [b.report or {} for b in ours]
    counts = {
        "answers": len(pairs),
        "differing": len(differing),
        "tokens": sum(a.num_tokens for a in alone),
    }
    for name in ("judged_segments", "kept_segments", "matched_tokens", "target_passes"):
        counts[name] = sum(r.get(name, 0) for r in reports)
    if differing:
        counts["first_differing"] = differing[0]
    return counts


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    tokenizer = load_tokenizer(str(TARGET_PATH))
    with tempfile.TemporaryDirectory(prefix="sglang-parse-identity-") as folder:
        arms = arm_args(DemoOptions())
        arms["parse"] += JUDGING
        servers = {
            arm: ServerProcess(flags, arm, Path(folder) / f"{arm}.log")
            for arm, flags in arms.items()
        }
        with running(list(servers.values())):
            for seed in args.seeds:
                prompts = encode_prompts(tokenizer, make_problems(args.problems, seed))
                ask = partial(measure, prompts=prompts, concurrency=args.concurrency)
                alone = ask(servers["target"].url).results
                for arm, custom in ARMS.items():
                    ours = ask(servers["parse"].url, custom_params=custom).results
                    row = {"arm": arm, "seed": seed, "concurrency": args.concurrency}
                    yield row | compared(alone, ours) | provenance()


def total(rows: Sequence[dict[str, Any]]) -> dict[str, tuple[int, int]]:
    """Arm to (answers, how many of them differ)."""
    return {
        arm: (
            sum(r["answers"] for r in rows if r["arm"] == arm),
            sum(r["differing"] for r in rows if r["arm"] == arm),
        )
        for arm in dict.fromkeys(r["arm"] for r in rows)
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5, 6, 7, 8]
    )
    parser.add_argument("--problems", type=int, default=128, help="of each seed")
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--out", type=Path, required=True, help="lines are added")
    args = parser.parse_args()
    with args.out.open("a", encoding="utf-8") as out:
        for row in run(args):
            out.write(json.dumps(row) + "\n")
            out.flush()
    rows = [json.loads(line) for line in args.out.read_text("utf-8").splitlines()]
    for arm, (answers, differing) in total(rows).items():
        print(f"{arm}: {differing} of {answers} answers differ from the target's own")


if __name__ == "__main__":
    main()
