"""End to end: output tokens a second of whole servers, with a pinned kept share.

    python -m benchmarks.gpu.serve --pair qwen3-32b-1.7b --out DIR --budget-s 500

The arms are in arms.py. Random prompts of fixed length, fixed output length, greedy.
"""

from __future__ import annotations

import argparse
import json
import os
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.gpu.answers import Answers, generate, random_prompts
from benchmarks.gpu.arms import Arm, arms_of, paths_off_file, servers_of
from benchmarks.gpu.pairs import PAIRS
from benchmarks.gpu.records import Clock, Records, spread
from benchmarks.provenance import shown_path
from sglang_parse.demo.servers import ServerProcess

START_S = 420.0  # the first server may compile kernels


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    p.add_argument("--pair", choices=PAIRS, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--models", type=Path, default=Path("build/gpu/models"))
    p.add_argument("--logs", type=Path, default=Path("build/gpu/logs"))
    p.add_argument("--arms", nargs="+", default=None)
    p.add_argument("--backend", default="flashinfer")
    p.add_argument("--context", type=int, default=1024)
    p.add_argument("--output", type=int, default=512)
    p.add_argument("--window", type=int, default=256)
    p.add_argument("--segment", type=int, default=16)
    p.add_argument("--concurrency", type=int, nargs="+", default=[1, 4, 16, 32])
    p.add_argument("--repeats", type=int, default=3)
    p.add_argument("--tp", type=int, default=1)
    p.add_argument(
        "--together",
        action="store_true",
        help="start all servers first; they share the GPU, one at a time is measured",
    )
    p.add_argument(
        "--answers",
        action="store_true",
        help="first compare PARSE's answers with those of the arm `target`",
    )
    p.add_argument(
        "--switch-paths",
        action="store_true",
        help="then measure each fast path of PARSE on and off in turns",
    )
    p.add_argument("--max-total-tokens", type=int, default=None, help="of each server")
    p.add_argument("--budget-s", type=float, default=500.0)
    return p


def server_flags(args: argparse.Namespace, arm: Arm) -> list[str]:
    most = max(args.concurrency)
    tp = ("--tp", str(args.tp)) if args.tp > 1 else ()
    flags = [*arm.flags, *tp, "--max-running-requests", str(most)]
    if args.max_total_tokens is not None:
        flags += ["--max-total-tokens", str(args.max_total_tokens)]
    if PAIRS[args.pair].target is not None:
        flags += ["--attention-backend", args.backend]
        flags += ["--cuda-graph-max-bs-decode", str(most)]
        flags += ["--context-length", str(2 * (args.context + args.output))]
    return flags


@contextmanager
def environment(values: dict[str, str]) -> Iterator[None]:
    """Variables of a server that is started inside; a folder of PYTHONPATH is added."""
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    if (paths := before.get("PYTHONPATH")) is not None:
        os.environ["PYTHONPATH"] = f"{values['PYTHONPATH']}{os.pathsep}{paths}"
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


def measure(
    url: str,
    args: argparse.Namespace,
    concurrency: int,
    seed: int,
    fields: dict[str, float],
) -> dict[str, Any]:
    """One wave of `concurrency` requests at once."""
    prompts = random_prompts(seed, concurrency, args.context)
    params = {"custom_params": fields} if fields else {}
    with ThreadPoolExecutor(concurrency) as threads:
        start = time.perf_counter()
        results = list(
            threads.map(lambda p: generate(url, p, args.output, **params), prompts)
        )
        elapsed = time.perf_counter() - start
    metas = [r["meta_info"] for r in results]
    return {
        "tokens_per_s": sum(m["completion_tokens"] for m in metas) / elapsed,
        "elapsed_s": elapsed,
        "accept_length": metas[0].get("spec_accept_length"),
        "parse": metas[0].get("parse"),
    }


class ArmServer:
    """Context manager: the server of `arms`, which have one start in common."""

    def __init__(
        self,
        arms: Sequence[Arm],
        args: argparse.Namespace,
        records: Records,
        clock: Clock,
    ) -> None:
        self._suffix = "" if args.tp == 1 else f"-tp{args.tp}"
        self._args, self._records, self._clock = args, records, clock
        todo = {
            arm: [n for n in args.concurrency if self.lacks(arm, n)] for arm in arms
        }
        self.todo = {arm: cells for arm, cells in todo.items() if cells}
        self._first = arms[0]
        self._flags = server_flags(args, arms[0])
        name = f"{args.pair}-{arms[0].name}{self._suffix}"
        self._log = args.logs / f"server-{name}.log"
        self._process: ServerProcess | None = None

    def cell(self, arm: Arm, concurrency: int) -> str:
        args = self._args
        name = arm.name + self._suffix
        return f"{args.pair}/{name}/c{args.context}/n{concurrency}"

    def lacks(self, arm: Arm, concurrency: int) -> bool:
        return not self._records.has(self.cell(arm, concurrency))

    def __enter__(self) -> ArmServer:
        """Start it, without a wait."""
        if not self.todo or self._clock.left_s() < 60:
            why = "no time left" if self.todo else "done"
            print(f"serve {self._first.name}: {why}", flush=True)
            self.todo = {}
            return self
        limit = min(START_S, self._clock.left_s())
        with environment(self._first.env):
            self._process = ServerProcess(
                self._flags, self._first.name, self._log, timeout_s=limit
            )
            self._process.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            self._process.stop()

    def run(self) -> None:
        """Measure what is to do of each arm."""
        if self._process is None:
            return
        arm = self._first
        try:
            self._process.wait_ready()
            if self._args.answers:
                self._compare(self._process)
            for arm, cells in self.todo.items():
                for n in cells:
                    self._measure(arm, n, self._process)
                    if self._clock.left_s() < 0:
                        return
            if self._args.switch_paths and arm.name != "target":
                self._switch_paths(self._process)
        except Exception as error:  # an arm that fails must not cost the others
            log = self._log
            tail = log.read_text(errors="replace")[-1500:] if log.exists() else ""
            cell = self.cell(arm, self._args.concurrency[0])
            self._records.add(
                "serve", cell, error=repr(error)[:500], log=tail, **self._common(arm)
            )

    def _compare(self, process: ServerProcess) -> None:
        """What this server answers, beside the target's answers on record."""
        arm, args = self._first, self._args
        answers = Answers(process.url, args.context)
        target_cell = f"{args.pair}/target{self._suffix}/answers"
        if arm.name == "target":
            found = answers.of_target()
        elif (target := self._records.find(target_cell)) is None:
            found = {"error": "the target's answers are not on record"}
        else:
            found = answers.of_parse(target)
        cell = f"{args.pair}/{arm.name}{self._suffix}/answers"
        self._records.add("answers", cell, **found, **self._common(arm))

    def _measure(self, arm: Arm, concurrency: int, process: ServerProcess) -> None:
        args, url = self._args, process.url
        # Compiles and captures, and lets the policy see this arm.
        first = argparse.Namespace(**vars(args) | {"output": args.output // 2})
        measure(url, first, concurrency, 10_000 + concurrency, arm.fields)
        waves: list[dict[str, Any]] = []
        for k in range(args.repeats):
            if waves and self._clock.left_s() < 0:
                break
            seed = 100 * concurrency + k
            waves.append(measure(url, args, concurrency, seed, arm.fields))
        self._records.add(
            "serve",
            self.cell(arm, concurrency),
            concurrency=concurrency,
            context=args.context,
            output=args.output,
            window=args.window,
            tokens_per_s=spread([w["tokens_per_s"] for w in waves]),
            waves=waves,
            start_s=round(process.ready_s, 1),
            **self._common(arm),
        )

    def _switch_paths(self, process: ServerProcess) -> None:
        """Waves with each fast path on and off in turns, on this one server."""
        with urllib.request.urlopen(process.url + "/server_info", timeout=60) as reply:
            state = json.load(reply)["internal_states"][0]
        taken = ("proven", "unproven")
        paths = [n for n, p in state["parse"]["paths"].items() if p["state"] in taken]
        for n in self._args.concurrency:
            for path in paths:
                for arm in self.todo:
                    if self._clock.left_s() < 30:
                        return
                    self._switch(path, arm, n, process.url)

    def _switch(self, path: str, arm: Arm, concurrency: int, url: str) -> None:
        args, off = self._args, paths_off_file(self._args)
        args = argparse.Namespace(**vars(args) | {"output": max(16, args.output // 4)})
        speeds: dict[bool, list[float]] = {True: [], False: []}
        try:
            for seed in range(-1, args.repeats):  # the first wave of each is a warm-up
                for is_on in (True, False):
                    off.write_text("" if is_on else path)
                    wave = measure(url, args, concurrency, 500 + seed, arm.fields)
                    if seed >= 0:
                        speeds[is_on].append(wave["tokens_per_s"])
        finally:
            off.write_text("")
        on, without = spread(speeds[True]), spread(speeds[False])
        self._records.add(
            "switch",
            f"{self.cell(arm, concurrency)}/without-{path}",
            tokens_per_s=on,
            off_tokens_per_s=without,
            gain=round(on["median"] / without["median"], 3),
            **self._common(arm),
        )

    def _common(self, arm: Arm) -> dict[str, Any]:
        return {
            **{"pair": self._args.pair, "arm": arm.name + self._suffix},
            **{"tp": self._args.tp, "args": [shown_path(f) for f in self._flags]},
            **{"pinned": arm.pinned, "fields": arm.fields},
        }


def main() -> None:
    args = parser().parse_args()
    args.logs.mkdir(parents=True, exist_ok=True)
    records = Records(args.out / "serve.jsonl")
    clock = Clock(args.budget_s)
    groups = servers_of(arms_of(args))
    for batch in [groups] if args.together else [[group] for group in groups]:
        with ExitStack() as stack:
            started = [
                stack.enter_context(ArmServer(arms, args, records, clock))
                for arms in batch
            ]
            for server in started:
                server.run()
    records.exit_on_errors()


if __name__ == "__main__":
    main()
