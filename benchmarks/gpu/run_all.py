"""Every measurement that needs a card in one command, unattended, within 25 minutes.

    python -m benchmarks.gpu.run_all --out benchmarks/results/gpu
    python -m benchmarks.gpu.run_all --out DIR --budget-s 560 --resume   # in parts
    python -m benchmarks.gpu.run_all --out DIR --dry-run                 # on CPU, tiny

Stages are processes of their own, each in a time box, in the order in which they are
worth having: a stage that dies or runs over costs its own rest, nothing else, and every
cell is on disk when it is measured. With --resume and the same --out, cells that are
there are not measured again. README.md says how to take this to a machine with a card.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Stage:
    """module: what to run. share_s: its time box; 0 for the rest of the budget."""

    name: str
    module: str
    args: tuple[str, ...]
    share_s: float


LARGE_PAIR = "qwen3-32b-1.7b"
SMALL_PAIR = "llama-8b-1b"
# Weights of the large pair with a head, and room for their KV at concurrency 32.
LARGE_PAIR_MIB = 100_000


def stages_on(memory_mib: int, num_cards: int = 1) -> tuple[Stage, ...]:
    """What to measure on a card: both pairs, or the small one where the other does not
    fit; and whole servers over several cards. memory_mib: of a card."""
    pair = LARGE_PAIR if memory_mib >= LARGE_PAIR_MIB else SMALL_PAIR
    stages = (
        Stage("forwards", "benchmarks.gpu.forwards", ("--pair", pair), share_s=300),
        Stage("serve", "benchmarks.gpu.serve", ("--pair", pair), share_s=560),
        Stage(
            "forwards-triton",
            "benchmarks.gpu.forwards",
            (
                *("--pair", pair, "--backend", "triton", "--contexts", "1024"),
                *("--windows", "256", "--segments", "16", "--batches", "1"),
            ),
            share_s=120,
        ),
    )
    if num_cards > 1:
        tp = str(1 << min(num_cards, 8).bit_length() - 1)
        args = ("--pair", pair, "--tp", tp, "--concurrency", "1", "8")
        stages = (
            *stages[:2],
            Stage("serve-tp", "benchmarks.gpu.serve", args, share_s=400),
            *stages[2:],
        )
    if pair == SMALL_PAIR:
        return stages
    return (
        *stages,
        Stage(
            "forwards-small",
            "benchmarks.gpu.forwards",
            (
                *("--pair", SMALL_PAIR, "--windows", "64", "256", "1024"),
                *("--segments", "4", "16", "--batches", "1", "16"),
            ),
            share_s=150,
        ),
        Stage("serve-small", "benchmarks.gpu.serve", ("--pair", SMALL_PAIR), share_s=0),
    )


def cards_memory_mib() -> list[int]:
    """Of each card, as nvidia-smi says; empty without one."""
    query = ("nvidia-smi", "--query-gpu=memory.total", "--format=csv,noheader,nounits")
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
        return [int(line) for line in done.stdout.split()]
    except (OSError, subprocess.TimeoutExpired, ValueError):
        return []


TINY = (
    Stage(
        "forwards",
        "benchmarks.gpu.forwards",
        (
            *("--pair", "embedded", "--contexts", "64", "--windows", "8", "16"),
            *("--segments", "1", "4", "--batches", "1", "4", "--repeats", "3"),
        ),
        share_s=300,
    ),
    Stage(
        "serve",
        "benchmarks.gpu.serve",
        (
            *("--pair", "embedded", "--arms", "target", "parse-0.9"),
            *("--context", "64", "--output", "64", "--window", "32"),
            *("--segment", "8", "--concurrency", "1", "4", "--repeats", "2"),
        ),
        share_s=400,
    ),
)


def run_stage(stage: Stage, out: Path, logs: Path, limit_s: float) -> str:
    """`ok`, or why not. The stage knows its limit and is stopped some time after it."""
    command = [sys.executable, "-m", stage.module, *stage.args]
    command += ["--out", str(out), "--budget-s", str(max(30.0, limit_s - 30.0))]
    if stage.module.endswith(".serve"):
        command += ["--logs", str(logs)]
    log = logs / f"stage-{stage.name}.log"
    print(f"== {stage.name}, {limit_s:.0f} s: {' '.join(command)}", flush=True)
    started = time.monotonic()
    with open(log, "ab") as f:
        process = subprocess.Popen(
            command, cwd=ROOT, stdout=f, stderr=subprocess.STDOUT, env=os.environ
        )
        try:
            code = process.wait(timeout=limit_s + 30.0)
            outcome = "ok" if code == 0 else f"exit status {code}"
        except subprocess.TimeoutExpired:
            process.terminate()
            try:
                process.wait(timeout=10.0)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            outcome = "stopped, it ran over its time"
    print(f"== {stage.name}: {outcome}, {time.monotonic() - started:.0f} s", flush=True)
    if outcome != "ok":
        print(log.read_text(errors="replace")[-3000:], flush=True)
    return outcome


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--out", type=Path, default=ROOT / "benchmarks/results/gpu")
    p.add_argument("--logs", type=Path, default=Path("build/gpu/logs"))
    p.add_argument("--budget-s", type=float, default=1500.0)
    p.add_argument("--stages", nargs="+", default=None)
    p.add_argument("--dry-run", action="store_true", help="tiny sizes, any machine")
    p.add_argument("--resume", action="store_true", help="go on with what is in --out")
    args = p.parse_args()
    out = args.out.resolve()
    out.mkdir(parents=True, exist_ok=True)
    args.logs.mkdir(parents=True, exist_ok=True)
    if any(out.glob("*.jsonl")) and not args.resume:
        p.error(f"{out} holds results; give another --out, or --resume to go on there")
    end = time.monotonic() + args.budget_s
    failed = []
    cards = cards_memory_mib()
    stages = TINY if args.dry_run else stages_on(min(cards, default=0), len(cards))
    for stage in stages:
        if args.stages is not None and stage.name not in args.stages:
            continue
        left = end - time.monotonic()
        if left < 60:
            print(f"== {stage.name}: left out, {left:.0f} s remain", flush=True)
            continue
        limit_s = min(stage.share_s or left, left)
        if run_stage(stage, out, args.logs, limit_s) != "ok":
            failed.append(stage.name)
    plot = [sys.executable, "-m", "benchmarks.gpu.plot", "--out", str(out)]
    if subprocess.run(plot, cwd=ROOT).returncode:
        failed.append("plot")
    if failed:
        sys.exit(
            f"stages with trouble: {', '.join(failed)}; see the logs in {args.logs}"
        )


if __name__ == "__main__":
    main()
