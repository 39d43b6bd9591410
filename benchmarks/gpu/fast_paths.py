"""Is each fast path of a pair right on this machine, and what does it give?

    python -m benchmarks.gpu.fast_paths --pair qwen3-32b-1.7b --out DIR

The pair is built in this process (on a CPU, each of several in one of its own), its
paths are proven in full, and then each is timed on and off in turns, at several numbers
of requests. A cell holds both times in milliseconds and `gain`, the time off over the
time on.

The rule, written before anything was measured: a path whose gain is below 1.03 in every
cell of a card is deleted.
"""

from __future__ import annotations

import argparse
import importlib
import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from benchmarks.gpu.engine import Engine
from benchmarks.gpu.pairs import PAIRS, TINY_PAIRS, model_args, pair_parser
from benchmarks.gpu.records import Clock, Records, spread, timed
from sglang_parse.cpu.entry import SWITCH_ENV

SEGMENTS, SUFFIX_LEN, CHAIN = 4, 24, 4
DRAFT_STEPS = 16
ABSENT, OFF = "absent", "off"


def parser() -> argparse.ArgumentParser:
    p = pair_parser(__doc__.splitlines()[0], PAIRS | TINY_PAIRS, nargs="+")
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--window", type=int, default=64)
    p.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    p.add_argument(
        "--replay", action="store_true", help="capture on a CPU, to try this script"
    )
    return p


class PathBench:
    """One pair: its proof, and the times of its paths."""

    def __init__(self, args: argparse.Namespace, pair: str, records: Records) -> None:
        self.args, self.records, self.clock = args, records, Clock(args.budget_s)
        flags = model_args((PAIRS | TINY_PAIRS)[pair], args.models)
        flags += ["--speculative-algorithm", "PARSE"]
        flags += ["--speculative-parse-prove", "full"]
        flags += ["--max-running-requests", str(max(64, *args.batches))]
        flags += ["--cuda-graph-max-bs-decode", str(max(160, *args.batches))]
        if args.replay:
            flags += ["--dtype", "float32", "--max-total-tokens", "4096"]
        if args.backend:
            flags += ["--attention-backend", args.backend]
        self.engine = Engine(flags)
        self.verifier = self.engine.parse.parts.verifier
        self.paths = self.verifier.paths
        self.name = f"{pair}/{self.engine.args.attention_backend}"

    def run(self) -> None:
        for name, found in self.paths.as_dict().items():
            self.records.add("proof", f"{self.name}/proof/{name}", **found)
        for batch in self.args.batches:
            for name, work in self.works(batch):
                self.time_path(name, batch, work)

    def works(self, batch: int) -> Iterator[tuple[str, Callable[[], Any]]]:
        """What each path is timed by."""
        engine, context, window = self.engine, self.args.context, self.args.window
        rows = engine.fill_rows(batch, context + window + 2)
        yield "target_steps", partial(engine.decode, rows, context)
        yield "draft_steps", partial(engine.draft, rows, context, DRAFT_STEPS)
        plan = engine.verify_plan(batch, context, window, SEGMENTS, SUFFIX_LEN)
        scratch = engine.scratch(plan.num_suffix_tokens)
        where = {
            "rows": rows.tolist(),
            "req_pool_indices": rows,
            "table": engine.table,
        }
        yield (
            "pass_graphs",
            partial(self.verifier.verify, plan, scratch=scratch, **where),
        )
        chain = engine.verify_plan(batch, context, CHAIN, 0, 0)
        yield "short_passes", partial(self.short_pass, chain, rows, where)

    def short_pass(self, plan: Any, rows: torch.Tensor, where: dict[str, Any]) -> None:
        """A pass without verdicts, as a decode step where that is on."""
        from sglang_parse.requests.round_records import Round

        batch = SimpleNamespace(
            reqs=[None] * len(rows), req_pool_indices=rows, return_hidden_states=False
        )
        passes = self.engine.parse.batches.engine.target.short_passes
        round = Round(batch, [])
        if self.paths.is_on("short_passes") and passes.fits(round, plan):
            passes.run(round, plan)
            return
        none = torch.empty(0, dtype=torch.int64, device=rows.device)
        self.verifier.verify(plan, scratch=none, **where)

    def time_path(self, name: str, batch: int, work: Callable[[], Any]) -> None:
        """On and off in turns, so that a slow minute hits both."""
        cell = f"{self.name}/gain/{name}/b{batch}"
        before = self.paths.states.get(name)
        if self.records.has(cell) or self.clock.left_s() < 0 or before is None:
            return
        if before.state in (ABSENT, OFF):
            return
        samples: dict[bool, list[float]] = {True: [], False: []}
        try:
            for _ in range(3):
                for is_on in (True, False):
                    self.paths.set(name, before.state if is_on else OFF)
                    samples[is_on] += timed(
                        work,
                        self.engine.synchronize,
                        repeats=max(1, self.args.repeats // 3),
                        warmup=1,
                    )
        except Exception as error:  # a cell that fails must not cost the others
            self.records.add("gain", cell, error=repr(error)[:500])
            return
        finally:
            self.paths.states[name] = before
        on, off = spread(samples[True]), spread(samples[False])
        self.records.add(
            "gain", cell, ms=on, off_ms=off, gain=round(off["median"] / on["median"], 3)
        )


def replay_on_cpu() -> None:
    """Decode steps are captured by the tests' stand-in for CUDA graphs."""
    os.environ.setdefault(SWITCH_ENV, "1")
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from tests.support import cpu_graphs

    cpu_graphs.install(prefills=True)


def run(args: argparse.Namespace, pair: str) -> None:
    records = Records(args.out / "fast_paths.jsonl")
    # Cells of the proof are found again too: a second run may follow a repair.
    PathBench(args, pair, records).run()
    records.exit_on_errors()


def run_forked(args: argparse.Namespace) -> None:
    """A process for each pair, after what takes longest on a CPU: imports."""
    replay_on_cpu()
    importlib.import_module("sglang.srt.models.registry")  # it imports all models
    for pair in args.pair:
        child = multiprocessing.get_context("fork").Process(
            target=run, args=(args, pair)
        )
        child.start()
        child.join()
        if child.exitcode:
            sys.exit(f"the pair {pair} ended with exit status {child.exitcode}")


def main() -> None:
    args = parser().parse_args()
    if args.replay:
        run_forked(args)
    else:
        if len(args.pair) > 1:
            sys.exit(f"--pair takes one pair without --replay, not {args.pair}.")
        run(args, args.pair[0])


if __name__ == "__main__":
    with torch.no_grad():
        main()
