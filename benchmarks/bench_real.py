"""The real model's speed: target, exact mode, EAGLE-3 and the calibrated server.

    python -m benchmarks.bench_real --out benchmarks/results/real/speed.jsonl
    python -m benchmarks.bench_real --out FILE --report

The servers of all arms are up together and measured one at a time, in turns: every
repeat asks each arm at each concurrency and each kind of prompt, and every other repeat
takes the arms from last to first. A measurement is one JSON line, with CPU time of the
whole server, which other programs on the machine do not stretch. The same command goes
on where it was stopped, and starts no server if nothing is missing.

Arms: `target` is stock SGLang, and `again` a second server of it: what they differ by
is the machine's noise, and all arms are compared with their mean. `exact` has the draft
model; `eagle3` has the head; `calibrated` has both, and the settings that
`sglang-parse calibrate` wrote. `ngram` copies earlier text, and has no other drafter:

    python -m benchmarks.bench_real --out FILE --arms target ngram \\
        --kinds prose copies --concurrency 1 --tokens 160
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from benchmarks.real_model import RealModels, real_models
from benchmarks.real_model.demo import draft_args, head_args
from benchmarks.real_model.prompts import conversations
from sglang_parse.demo.figures import summarise
from sglang_parse.demo.load import Prompt, load_tokenizer, measure
from sglang_parse.demo.servers import ServerProcess, running

KINDS = {
    "prose": ("chat", "system"),
    "code": ("code",),
    "lists": ("lists", "json"),
    "copies": ("copies",),
}
ALONE = ("target", "again")
ARMS = ("target", "exact", "eagle3", "calibrated", "again", "ngram")
USUAL = 4, 3  # the arms and the kinds that are asked unless others are named
CALIBRATED = Path("benchmarks/results/real/calibrated.json")
SERVER_ARGS = ("--max-total-tokens", "8192", "--max-running-requests", "16")
WAVES = 3  # answers for each place that is taken
MEANS = ("output_tok_s", "cpu_ms_a_token")
Row = dict[str, Any]


@dataclass(frozen=True)
class Cell:
    """What one measurement is of."""

    repeat: int
    concurrency: int
    kind: str
    arm: str


def server_flags(arm: str, models: RealModels) -> list[str]:
    flags = ["--model-path", str(models.target), *SERVER_ARGS]
    if arm in ALONE:
        return flags
    flags += ["--speculative-algorithm", "PARSE"]
    if arm == "ngram":
        return [*flags, "--speculative-parse-drafters", "ngram"]
    if arm == "calibrated":
        flags += ["--speculative-parse-config", str(CALIBRATED)]
        flags += ["--speculative-draft-model-path", str(models.draft)]
    if arm == "exact":
        flags += draft_args(models.draft)
    if arm != "exact":
        flags += head_args(models.head)
    return flags


def cells(args: argparse.Namespace) -> Iterator[Cell]:
    for repeat in range(args.repeats):
        arms = args.arms if repeat % 2 == 0 else args.arms[::-1]
        for concurrency in args.concurrency:
            for kind in args.kinds:
                yield from (Cell(repeat, concurrency, kind, arm) for arm in arms)


def prompts_of(tokenizer: Any, kind: str, count: int, tokens: int) -> list[Prompt]:
    """`count` conversations, of which each answer has `tokens` tokens at most."""
    found = []
    for messages in conversations(count, KINDS[kind]):
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        found.append(Prompt(None, tuple(ids), tokens))
    return found


def read_rows(path: Path) -> list[Row]:
    if not path.is_file():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def cell_of(row: Row) -> Cell:
    return Cell(row["repeat"], row["concurrency"], row["kind"], row["arm"])


def run(args: argparse.Namespace) -> None:
    """Measure what `args.out` lacks, until `args.minutes` are over."""
    end = time.monotonic() + 60 * args.minutes
    models = real_models(print)
    done = {cell_of(row) for row in read_rows(args.out)}
    left = [cell for cell in cells(args) if cell not in done]
    if not left:
        return
    tokenizer = load_tokenizer(str(models.target))
    with tempfile.TemporaryDirectory(prefix="sglang-parse-real-") as folder:
        servers = {
            arm: ServerProcess(
                server_flags(arm, models),
                arm,
                Path(folder) / f"{arm}.log",
                num_threads=args.threads,
            )
            for arm in args.arms
        }
        with ExitStack() as stack, args.out.open("a") as out:
            for server in servers.values():
                # One by one: SGLang takes what others load for memory of its own.
                stack.enter_context(running([server]))
            for cell in left:
                if time.monotonic() >= end:
                    print(f"{args.minutes:g} minutes are over; run it again to go on.")
                    return
                row = measured(cell, servers, tokenizer, args)
                out.write(json.dumps(row) + "\n")
                out.flush()


def measured(
    cell: Cell,
    servers: dict[str, ServerProcess],
    tokenizer: Any,
    args: argparse.Namespace,
) -> Row:
    """One cell's figures, and how many of its answers are the target's."""
    # Requests that draft end at different times: others have to take their places.
    count = max(args.prompts, WAVES * cell.concurrency)
    prompts = prompts_of(tokenizer, cell.kind, count, args.tokens)
    is_first = cell.repeat == 0 and cell.kind == args.kinds[0]
    server = servers[cell.arm]
    if is_first:
        measure(server.url, prompts[: cell.concurrency], concurrency=cell.concurrency)
    before = server.cpu_s()
    found = measure(server.url, prompts, concurrency=cell.concurrency)
    summary = summarise(
        cell.arm, cell.concurrency, found.results, found.wall_s, None
    ).as_dict()
    answers = [list(r.token_ids) for r in found.results]
    cpu_ms = 1e3 * (server.cpu_s() - before) / summary["output_tokens"]
    key = {"repeat": cell.repeat, "kind": cell.kind, "answers": answers}
    key["cpu_ms_a_token"] = round(cpu_ms, 3)
    print(cell, round(summary["output_tok_s"], 1), "tok/s", flush=True)
    return summary | key | provenance()


def report(rows: Sequence[Row]) -> str:
    """Medians over the repeats; ratios to the target alone of the same repeat, with
    range."""
    groups: dict[tuple[str, int, str], list[Row]] = defaultdict(list)
    alone: dict[tuple[str, int, int], list[Row]] = defaultdict(list)
    for row in rows:
        groups[row["kind"], row["concurrency"], row["arm"]].append(row)
        if row["arm"] in ALONE:
            alone[row["kind"], row["concurrency"], row["repeat"]].append(row)
    targets = {
        key: found[0]
        | {name: statistics.mean(r[name] for r in found) for name in MEANS}
        for key, found in alone.items()
    }
    lines = [
        "| prompts | requests | arm | tok/s | over the target | the same of CPU time "
        "| tokens a pass | latency p50, s | TTFT p50, s | equal answers |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (kind, concurrency, arm), group in groups.items():
        pairs = [(r, targets.get((kind, concurrency, r["repeat"]))) for r in group]
        lines.append(table_row(kind, concurrency, arm, [p for p in pairs if p[1]]))
    return "\n".join(lines)


def table_row(
    kind: str, concurrency: int, arm: str, pairs: Sequence[tuple[Row, Any]]
) -> str:
    def median(name: str) -> float:
        return statistics.median(row[name] or 0.0 for row, _ in pairs)

    ratios = [row["output_tok_s"] / base["output_tok_s"] for row, base in pairs]
    of_cpu = [base["cpu_ms_a_token"] / row["cpu_ms_a_token"] for row, base in pairs]
    passes = statistics.median(
        (row["output_tokens"] - row["problems"])  # the prefill gives the first token
        / max(1, row["problems"] * row["passes_per_answer"])
        for row, _ in pairs
    )
    same = sum(
        ours == theirs
        for row, base in pairs
        for ours, theirs in zip(row["answers"], base["answers"], strict=True)
    )
    total = sum(len(row["answers"]) for row, _ in pairs)
    return (
        f"| {kind} | {concurrency} | {arm} | {median('output_tok_s'):.1f} "
        f"| {statistics.median(ratios):.2f} ({min(ratios):.2f}-{max(ratios):.2f}) "
        f"| {statistics.median(of_cpu):.2f} ({min(of_cpu):.2f}-{max(of_cpu):.2f}) "
        f"| {passes:.2f} | {median('latency_p50_s'):.2f} | {median('ttft_p50_s'):.2f} "
        f"| {same}/{total} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines")
    parser.add_argument(
        "--arms", nargs="+", choices=ARMS, default=list(ARMS[: USUAL[0]])
    )
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=list(KINDS)[: USUAL[1]]
    )
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 4, 16])
    parser.add_argument("--prompts", type=int, default=4, help="of a cell, or more")
    parser.add_argument("--tokens", type=int, default=48, help="of an answer at most")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--minutes", type=float, default=15, help="default: 15")
    parser.add_argument("--threads", type=int, default=1, help="of each server")
    parser.add_argument("--report", action="store_true", help="measure nothing")
    args = parser.parse_args()
    if not args.report:
        run(args)
    print(report(read_rows(args.out)))


if __name__ == "__main__":
    main()
