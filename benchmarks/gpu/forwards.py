"""What do forwards of one pair cost? Run by run_all.py, one process per pair.

    python -m benchmarks.gpu.forwards --pair qwen3-32b-1.7b --out DIR --budget-s 240

Cells, at every context:
- `floor`: measured copy bandwidth (bytes read and written) and matmul rate.
- `decode`, `draft`: a plain decode step of the target, a draft step, with graphs.
- `verify`: a pass over a window of W tokens in K segments, by each route; beside it
  `prefill`, an ordinary prefill of as many tokens.
- `parity`: how far the routes' verdict logits lie apart, over their own spread.
- `forks`: K separate prefills in one batch, as a RadixAttention fork would run them;
  `sequential`: K prefills, one segment and its question after the other.
Milliseconds: median, least and greatest of the repeats, all samples in the record.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engine import Engine, boundaries_of
from benchmarks.gpu.pairs import PAIRS, model_args, pair_parser, shape_of
from benchmarks.gpu.records import Clock, Records, spread, timed
from sglang_parse.verify.backends.routes import backend_of

SUFFIX_LEN = 24
DRAFT_STEPS = 64


def parser() -> argparse.ArgumentParser:
    p = pair_parser(__doc__.splitlines()[0], PAIRS)
    p.add_argument("--contexts", type=int, nargs="+", default=[1024, 8192])
    p.add_argument("--windows", type=int, nargs="+", default=[32, 128, 256, 512, 1024])
    p.add_argument("--segments", type=int, nargs="+", default=[1, 4, 16])
    p.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 32])
    return p


class Bench:
    """One pair's cells; a cell measured before, or too late for the clock, is left."""

    def __init__(self, args: argparse.Namespace, records: Records) -> None:
        self.args = args
        self.records = records
        self.clock = Clock(args.budget_s)
        flags = model_args(PAIRS[args.pair], args.models)
        flags += ["--speculative-algorithm", "PARSE"]
        flags += ["--max-running-requests", "64", "--cuda-graph-max-bs-decode", "32"]
        if args.backend:
            flags += ["--attention-backend", args.backend]
        self.engine = Engine(flags)
        self.engine.fill_kv()
        self.itemsize = torch.empty(0, dtype=self.engine.runner.dtype).element_size()

    def cell(self, name: str, work: Callable[[], Any], **values: Any) -> float | None:
        """Measure and record; the median in milliseconds, None if left out."""
        cell = f"{self.args.pair}/{self.engine.args.attention_backend}/{name}"
        if self.records.has(cell):
            return None
        if self.clock.left_s() < 0:
            print(f"forwards {cell}: left out, the time is up", flush=True)
            return None
        try:
            samples = timed(
                work,
                self.engine.synchronize,
                repeats=self.args.repeats,
                warmup=2,
            )
        except Exception as error:  # a cell that fails must not cost the others
            self.records.add("forwards", cell, error=repr(error)[:500], **values)
            return None
        per = values.pop("per", 1)
        samples = [s / per for s in samples]
        self.records.add(
            "forwards",
            cell,
            pair=self.args.pair,
            backend=self.engine.args.attention_backend,
            ms=spread(samples),
            samples_ms=[round(s, 4) for s in samples],
            **values,
        )
        return spread(samples)["median"]

    def run(self) -> None:
        self.floors()
        for context in self.args.contexts:
            self.decode_steps(context)
            self.passes(context)

    # -- Floors ------------------------------------------------------------------

    def floors(self) -> None:
        device, dtype = self.engine.device, self.engine.runner.dtype
        on_gpu = device.type != "cpu"
        size = 1 << (31 if on_gpu else 22)
        source = torch.empty(size, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        self.cell(
            "floor/copy", lambda: target.copy_(source), kind="copy", num_bytes=2 * size
        )
        n = 8192 if on_gpu else 256
        a = torch.randn(n, n, device=device).to(dtype)
        b = torch.randn(n, n, device=device).to(dtype)
        self.cell("floor/matmul", lambda: a @ b, kind="matmul", flops=2 * n**3)
        for role, config in self.shapes().items():
            shape = shape_of(config, self.itemsize)
            self.records.add(
                "forwards",
                f"{self.args.pair}/{self.engine.args.attention_backend}/shape/{role}",
                pair=self.args.pair,
                backend=self.engine.args.attention_backend,
                kind="shape",
                role=role,
                itemsize=self.itemsize,
                **vars(shape),
            )

    def shapes(self) -> dict[str, dict[str, Any]]:
        folders = {
            "target": Path(self.engine.args.model_path),
            "draft": Path(self.engine.args.speculative_draft_model_path),
        }
        return {
            role: json.loads((folder / "config.json").read_text())
            for role, folder in folders.items()
        }

    # -- Cells -------------------------------------------------------------------

    def decode_steps(self, context: int) -> None:
        engine = self.engine
        for bs in self.args.batches:
            common = {"context": context, "bs": bs}
            try:
                rows = engine.fill_rows(bs, context + DRAFT_STEPS + 2)
            except RuntimeError as error:
                print(f"decode {common}: left out, {error}", flush=True)
                continue

            def decode(rows: torch.Tensor = rows) -> None:
                engine.decode(rows, context)

            self.cell(f"decode/c{context}/b{bs}", decode, kind="decode", **common)

            # One forward of catch-up, then a decode step per token but the last.
            def draft(rows: torch.Tensor = rows) -> None:
                engine.draft(rows, context, DRAFT_STEPS)

            self.cell(
                f"draft/c{context}/b{bs}",
                draft,
                kind="draft",
                per=DRAFT_STEPS,
                num_steps=DRAFT_STEPS,
                **common,
            )

    def passes(self, context: int) -> None:
        for window in self.args.windows:
            for num_segments in self.args.segments:
                if num_segments <= window:
                    self.one_shape(context, window, num_segments)

    def one_shape(self, context: int, window: int, num_segments: int) -> None:
        """All ways to check the same prefixes."""
        engine = self.engine
        common = {"context": context, "window": window, "segments": num_segments}
        name = f"c{context}/w{window}/k{num_segments}"
        cuts = boundaries_of(window, num_segments)
        forked = sum(cuts) + num_segments * SUFFIX_LEN
        try:
            rows = engine.fill_rows(1, context + window + 2)
            room = engine.scratch(max(forked, num_segments * SUFFIX_LEN + window + 2))
        except RuntimeError as error:
            print(f"pass {common}: left out, {error}", flush=True)
            return
        plan = engine.verify_plan(1, context, window, num_segments, SUFFIX_LEN)
        scratch = room[: plan.num_suffix_tokens]
        common["num_tokens"] = plan.num_verify_tokens
        routes = backend_of(engine.args.attention_backend).inputs
        for route in routes:
            self.cell(
                f"verify-{route}/{name}",
                lambda route=route: engine.verify(plan, rows, scratch, route),
                kind="verify",
                route=route,
                **common,
            )
        if len(routes) > 1:
            self.parity(f"parity/{name}", plan, rows, scratch, common)
        row = int(rows[0])

        def fork(prefixes: list[int], lens: list[int]) -> list[torch.Tensor]:
            """Rows of their own that share columns of `row` and go on in `room`."""
            at = 0
            for i, (prefix, n) in enumerate(zip(prefixes, lens, strict=True)):
                engine.table[row + 1 + i, :prefix] = engine.table[row, :prefix]
                engine.table[row + 1 + i, prefix : prefix + n] = room[at : at + n].to(
                    engine.table.dtype
                )
                at += n
            forked_rows = torch.arange(row + 1, row + 1 + len(lens))
            return list(forked_rows.to(engine.device).split(1))

        # As many tokens as the pass, in one ordinary prefill.
        whole = [plan.num_verify_tokens]
        whole_rows = fork([context], whole)[0]
        self.cell(
            f"prefill/{name}",
            lambda: engine.prefill(whole_rows, [context], whole, room[: whole[0]]),
            kind="prefill",
            **common,
        )
        lens = [cut + SUFFIX_LEN for cut in cuts]
        prefixes = [context + 1] * num_segments
        forked_rows = torch.cat(fork(prefixes, lens))
        self.cell(
            f"forks/{name}",
            lambda: engine.prefill(forked_rows, prefixes, lens, room[:forked]),
            kind="forks",
            **common,
        )
        starts = [0, *cuts[:-1]]
        steps = [
            (context + 1 + start, cut - start + SUFFIX_LEN)
            for start, cut in zip(starts, cuts, strict=True)
        ]
        step_rows = fork([p for p, _ in steps], [n for _, n in steps])

        def sequential() -> None:
            for one, (prefix, n) in zip(step_rows, steps, strict=True):
                engine.prefill(one, [prefix], [n], room[:n])

        self.cell(f"sequential/{name}", sequential, kind="sequential", **common)

    def parity(
        self,
        name: str,
        plan: Any,
        rows: torch.Tensor,
        scratch: torch.Tensor,
        common: dict[str, Any],
    ) -> None:
        """Verdict logits by mask against those by virtual sequences, random KV."""
        cell = f"{self.args.pair}/{self.engine.args.attention_backend}/{name}"
        if self.records.has(cell) or self.clock.left_s() < 0:
            return
        try:
            by_mask, by_virtual = (
                self.engine.verify(plan, rows, scratch, route).float().clone()
                for route in ("mask", "virtual")
            )
        except Exception as error:
            self.records.add("forwards", cell, error=repr(error)[:500], **common)
            return
        gap = float((by_mask - by_virtual).abs().max())
        self.records.add(
            "forwards",
            cell,
            pair=self.args.pair,
            backend=self.engine.args.attention_backend,
            kind="parity",
            max_difference=gap,
            logits_std=float(by_mask.std()),
            same_argmax=bool((by_mask.argmax(-1) == by_virtual.argmax(-1)).all()),
            **common,
        )


def main() -> None:
    args = parser().parse_args()
    records = Records(args.out / "forwards.jsonl")
    with torch.no_grad():
        Bench(args, records).run()
    records.exit_on_errors()


if __name__ == "__main__":
    main()
