"""Modes against the target alone: how fast, how right, how late the first token?

    python -m benchmarks.bench_modes --out benchmarks/results/modes.jsonl
    python -m benchmarks.bench_modes --concurrency 1 16 --repeats 3 --out modes.jsonl

Arms on the embedded task, same server flags: `target` (stock SGLang), `semantic`,
`semantic-no-tail`, `one-segment` (PARSE held to one segment a pass), `exact`
(token-level speculation with the same draft), `off`, and `hostile` / `hostile-exact`: a
server whose draft has its output rows shuffled, so that it never says what it means.
Servers are up together and measured one at a time; the
arms of a concurrency follow one another and the whole sweep is repeated. One JSON line
per measurement with argv, commit, versions and machine; then medians and spreads.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness.arms import ARMS as BENCH_ARMS
from benchmarks.harness.arms import make_hostile_draft
from benchmarks.provenance import provenance
from sglang_parse.cli.demo_run import EVAL_SEED, SERVER_ARGS, WARM_UP_SEED
from sglang_parse.demo.figures import ArmSummary, summarise
from sglang_parse.demo.load import (
    encode_prompts,
    load_tokenizer,
    measure,
)
from sglang_parse.demo.servers import ServerProcess, running
from sglang_parse.embedded import CONFIG_PATH, DRAFT_PATH, TARGET_PATH
from sglang_parse.embedded.task import make_problems

ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "target": ("target", {}),
    "semantic": ("parse", {"parse_mode": "semantic"}),
    "semantic-no-tail": ("parse", {"parse_exact_tail": False}),
    "one-segment": ("one-segment", {"parse_mode": "semantic"}),
    "exact": ("parse", {"parse_mode": "exact"}),
    "off": ("parse", {"parse_mode": "off"}),
    "hostile": ("hostile", {"parse_mode": "semantic"}),
    "hostile-exact": ("hostile", {"parse_mode": "exact"}),
}


def server_args(kind: str, hostile_path: Path, *more: str) -> list[str]:
    args = ["--model-path", str(TARGET_PATH), *SERVER_ARGS, *more]
    if kind == "target":
        return args
    draft = hostile_path if kind == "hostile" else DRAFT_PATH
    args += ["--speculative-draft-model-path", str(draft)]
    args += ["--speculative-parse-config", str(CONFIG_PATH)]
    if kind == "one-segment":
        args += BENCH_ARMS["sequential-server"].server_args
    return [*args, "--speculative-algorithm", "PARSE"]


def run(args: argparse.Namespace) -> list[ArmSummary]:
    summaries: list[ArmSummary] = []
    with tempfile.TemporaryDirectory(prefix="sglang-parse-bench-") as folder:
        hostile_path = make_hostile_draft(str(DRAFT_PATH))
        kinds = {ARMS[arm][0] for arm in args.arms}
        logs, more = Path(folder), ()
        if args.logs:
            logs, more = args.logs, ("--log-level", "debug")
            logs.mkdir(parents=True, exist_ok=True)
        servers = {
            kind: ServerProcess(
                server_args(kind, hostile_path, *more),
                kind,
                logs / f"{kind}.log",
                num_threads=args.threads,
            )
            for kind in sorted(kinds)
        }
        tokenizer = load_tokenizer(str(TARGET_PATH))
        warm_up = encode_prompts(tokenizer, make_problems(8, WARM_UP_SEED))
        with running(list(servers.values())), args.out.open("w") as out:
            for repeat in range(args.repeats):
                for concurrency in args.concurrency:
                    num = max(args.problems, 4 * concurrency)
                    problems = make_problems(num, EVAL_SEED + repeat)
                    prompts = encode_prompts(tokenizer, problems)
                    base: float | None = None
                    for arm in args.arms:
                        kind, custom = ARMS[arm]
                        measured = measure(
                            servers[kind].url,
                            prompts,
                            concurrency=concurrency,
                            warm_up=warm_up,
                            custom_params=custom,
                        )
                        summary = summarise(
                            arm, concurrency, measured.results, measured.wall_s, base
                        )
                        if arm == "target":
                            base = summary.output_tok_s
                        summaries.append(summary)
                        row = {"repeat": repeat, **summary.as_dict(), **provenance()}
                        out.write(json.dumps(row) + "\n")
                        out.flush()
                        print(brief([summary]), flush=True)
    return summaries


def brief(group: list[ArmSummary]) -> str:
    """One Markdown row: medians, and the spread of the ratio, over repeats."""

    def median(name: str) -> float:
        return statistics.median(getattr(s, name) or 1.0 for s in group)

    ratios = [s.ratio or 1.0 for s in group]
    first = group[0]
    return (
        f"| {first.arm} | {first.concurrency} | {100 * median('accuracy'):.1f} "
        f"| {median('output_tok_s'):.0f} | {statistics.median(ratios):.2f} "
        f"({min(ratios):.2f}-{max(ratios):.2f}) | {median('passes_per_answer'):.1f} "
        f"| {1000 * median('ttft_p95_s'):.0f} | {1000 * median('latency_p95_s'):.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 16, 32])
    parser.add_argument("--problems", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines, new")
    parser.add_argument(
        "--logs",
        type=Path,
        help="keep the servers' logs in this folder, their rounds in them "
        "(for benchmarks.simulate.measure; slower)",
    )
    args = parser.parse_args()
    if args.out.exists() and args.out.stat().st_size:
        parser.error(f"--out {args.out} has content; give a new file.")
    if "target" in args.arms:
        args.arms.sort(key=lambda arm: arm != "target")
    summaries = run(args)
    print("\n| arm | conc. | right % | tok/s | ratio | passes | p95 TTFT | p95 ms |")
    print("|---|---|---|---|---|---|---|---|")
    groups: dict[tuple[int, str], list[ArmSummary]] = {}
    for summary in summaries:
        groups.setdefault((summary.concurrency, summary.arm), []).append(summary)
    for _, group in sorted(groups.items()):
        print(brief(group))


if __name__ == "__main__":
    main()
