"""How long does a round keep the host busy, without its models?

    python -m benchmarks.bench_host --out host.jsonl
    python -m benchmarks.bench_host --baseline ../before --repeats 7 --out host.jsonl

Times the Python of a round over made-up drafts: cut them into segments, lay out the
pass, decide, record. With `--baseline` another checkout whose modules have the same
names and signatures is measured in the same run. Each repeat is a process of its own
with one thread, and the two checkouts take turns. A repeat's figure is the median over
its rounds of the CPU time, which other processes do not stretch. One JSON line per cell
and checkout with microseconds as [median, least, most] over the repeats, argv, commit,
versions and machine; then a table.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import string
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import provenance
from sglang_parse.judging.decide import Decision, choose_cut, decide
from sglang_parse.judging.segmenter import Segmenter
from sglang_parse.reporting.report import RequestReport, RoundRecord
from sglang_parse.verify.layout import (
    PassRequest,
    build_verify_plan,
    build_virtual_sequences,
)

REPOSITORY = Path(__file__).resolve().parents[1]
VOCAB_SIZE = 151_936  # Qwen3's
SUFFIX = tuple(range(24))
MAX_SEGMENTS = 16
CONTEXT_TOKENS = 48  # committed text that the segmenter is shown
WARM_UP = 5
STAGES = ("segment", "lay out", "decide", "record")
# Tokens that mean something to a segmenter; the rest of the vocabulary are words.
SPECIAL = (".", ",", "\n", ".\n", "\n\n", "Step", " 1", ":", "x", " =", "(", ")", ";")


@dataclass(frozen=True)
class Cell:
    """One line of the result: requests in the round, draft tokens of each."""

    bs: int
    window: int
    segmenter: str


def make_vocabulary(rng: random.Random) -> list[str]:
    """Text of every token id."""
    words = (
        " " + "".join(rng.choices(string.ascii_lowercase, k=rng.randint(1, 9)))
        for _ in range(VOCAB_SIZE - len(SPECIAL))
    )
    return [*SPECIAL, *words]


def make_draft(rng: random.Random, num_tokens: int) -> tuple[int, ...]:
    """Steps of one or two sentences or a line of code, about 20 tokens each."""
    ids = {text: i for i, text in enumerate(SPECIAL)}

    def words(least: int, most: int) -> list[int]:
        """Zipf's law: a word's share is inverse to its rank."""
        num_words = VOCAB_SIZE - len(SPECIAL)
        ranks = [num_words ** rng.random() for _ in range(rng.randint(least, most))]
        return [len(SPECIAL) - 1 + int(rank) for rank in ranks]

    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens += [ids["Step"], ids[" 1"], ids[":"], *words(6, 14)]
        if rng.random() < 0.5:
            tokens += [ids["."], *words(6, 14)]
        elif rng.random() < 0.5:
            tokens += [ids["x"], ids[" ="], ids["("], *words(1, 4), ids[")"]]
        tokens.append(ids[rng.choice([".\n", ".\n", "\n", "\n\n"])])
    return tuple(tokens[:num_tokens])


@dataclass(frozen=True)
class Inputs:
    """What the models and the scheduler give a round, per request."""

    seq_lens: list[int]
    drafts: list[tuple[int, ...]]
    #: Text committed before the draft.
    written: list[str]
    #: Verdict scores, of which a round takes one per boundary.
    scores: list[list[float]]

    @classmethod
    def random(cls, rng: random.Random, cell: Cell, texts: list[str]) -> Inputs:
        requests = range(cell.bs)
        before = [make_draft(rng, CONTEXT_TOKENS) for _ in requests]
        return cls(
            seq_lens=[rng.randint(100, 4000) for _ in requests],
            drafts=[make_draft(rng, cell.window) for _ in requests],
            written=["".join(texts[t] for t in tokens) for tokens in before],
            scores=[
                [float(rng.random() < 0.9) for _ in range(MAX_SEGMENTS)]
                for _ in requests
            ],
        )


def segment(segmenter: Segmenter, inputs: Inputs) -> list[tuple[int, ...]]:
    return [
        segmenter.boundaries(
            draft, ended=False, max_segments=MAX_SEGMENTS, previous_text=text
        )
        for draft, text in zip(inputs.drafts, inputs.written, strict=True)
    ]


def lay_out(inputs: Inputs, boundaries: list[tuple[int, ...]]) -> None:
    requests = zip(inputs.seq_lens, inputs.drafts, boundaries, strict=True)
    plan = build_verify_plan(
        [PassRequest(n, 1, draft, ends, SUFFIX) for n, draft, ends in requests]
    )
    build_virtual_sequences(plan)


def decide_all(inputs: Inputs, boundaries: list[tuple[int, ...]]) -> list[Decision]:
    """The target agrees with every token of the exact tails."""
    decisions = []
    requests = zip(inputs.drafts, boundaries, inputs.scores, strict=True)
    for draft, ends, scores in requests:
        cut = choose_cut(
            scores[: len(ends)],
            ends,
            num_draft_tokens=len(draft),
            threshold=0.5,
            keep_rule="first-failure",
            exact_tail=True,
        )
        own = [draft[j] if j < len(draft) else 1 for j in cut.rows]
        decisions.append(decide(cut, draft, own))
    return decisions


def record(
    reports: list[RequestReport],
    inputs: Inputs,
    boundaries: list[tuple[int, ...]],
    decisions: list[Decision],
) -> None:
    for i, (report, decision) in enumerate(zip(reports, decisions, strict=True)):
        report.record(
            RoundRecord(
                output_len=report.num_counted,
                accept_tokens=decision.accept_tokens,
                draft_tokens=inputs.drafts[i],
                drafted_by=(("model", len(inputs.drafts[i])),),
                boundaries=boundaries[i],
                scores=inputs.scores[i][: len(boundaries[i])],
                num_judged=decision.num_judged,
                num_matched=decision.num_matched,
            )
        )


def time_rounds(cell: Cell, texts: list[str], num_rounds: int) -> dict[str, float]:
    """Median microseconds of each stage and of their sum, over the rounds."""
    rng = random.Random(0)
    segmenter = Segmenter(cell.segmenter, texts)
    reports = [RequestReport("semantic", "", False) for _ in range(cell.bs)]
    rows: list[list[float]] = []
    for _ in range(WARM_UP + num_rounds):
        inputs = Inputs.random(rng, cell, texts)
        clock = [time.thread_time()]
        boundaries = segment(segmenter, inputs)
        clock.append(time.thread_time())
        lay_out(inputs, boundaries)
        clock.append(time.thread_time())
        decisions = decide_all(inputs, boundaries)
        clock.append(time.thread_time())
        record(reports, inputs, boundaries, decisions)
        clock.append(time.thread_time())
        spans = [b - a for a, b in zip(clock, clock[1:], strict=False)]
        rows.append([*spans, clock[-1] - clock[0]])
    columns = zip(*rows[WARM_UP:], strict=True)
    medians = [1e6 * statistics.median(column) for column in columns]
    return dict(zip((*STAGES, "round"), medians, strict=True))


def measure_here(cells: Sequence[Cell], num_rounds: int) -> dict[str, Any]:
    """One repeat, by the package that this process imports."""
    torch.set_num_threads(1)
    texts = make_vocabulary(random.Random(1))
    return {
        "commit": provenance()["commit"],
        "us": [time_rounds(cell, texts, num_rounds) for cell in cells],
    }


def measure_checkout(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """`measure_here` in a process that imports the package from `folder`."""
    command = [sys.executable, __file__, "--child", "--rounds", str(args.rounds)]
    for name in ("bs", "windows", "segmenters"):
        command += [f"--{name}", *map(str, getattr(args, name))]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def spread(values: Sequence[float]) -> list[float]:
    """[median, least, most]."""
    numbers = (statistics.median(values), min(values), max(values))
    return [round(number, 1) for number in numbers]


def result_rows(
    name: str, cells: Sequence[Cell], repeats: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """One row a cell, of one checkout. name: `this` or `baseline`."""
    where = {**provenance(), "commit": repeats[0]["commit"]}
    rows = []
    for k, cell in enumerate(cells):
        own = [repeat["us"][k] for repeat in repeats]
        us = {stage: spread([times[stage] for times in own]) for stage in own[0]}
        shape = {"bs": cell.bs, "window": cell.window, "segmenter": cell.segmenter}
        rows.append({"checkout": name, **shape, "us": us, **where})
    return rows


def print_table(rows: Sequence[dict[str, Any]]) -> None:
    names = ("requests", "window", "segmenter", "checkout", *STAGES, "round")
    print("|", " | ".join(names), "|")
    print("|---" * len(names) + "|")
    for row in sorted(rows, key=lambda r: (r["segmenter"], r["bs"], r["window"])):
        shown = [f"{m:.0f} ({a:.0f}-{b:.0f})" for m, a, b in row["us"].values()]
        keys = (row["bs"], row["window"], row["segmenter"], row["checkout"])
        print("|", " | ".join([*map(str, keys), *shown]), "|")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--bs", nargs="+", type=int, default=[1, 8, 32])
    parser.add_argument("--windows", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--segmenters", nargs="+", default=["step"])
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--baseline", type=Path, help="another checkout")
    parser.add_argument("--out", type=Path, help="JSON Lines, new")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    shapes = product(args.bs, args.windows, args.segmenters)
    cells = [Cell(*shape) for shape in shapes]
    if args.child:
        json.dump(measure_here(cells, args.rounds), sys.stdout)
        return
    if args.out is None:
        parser.error("--out is missing; expected a new file for the results.")
    if args.out.exists() and args.out.stat().st_size:
        parser.error(f"--out {args.out} has content; give a new file.")
    checkouts = {"baseline": args.baseline} if args.baseline else {}
    checkouts["this"] = REPOSITORY
    repeats: dict[str, list[dict[str, Any]]] = {name: [] for name in checkouts}
    for _ in range(args.repeats):
        for name, folder in checkouts.items():
            repeats[name].append(measure_checkout(folder.resolve(), args))
    rows = [r for name in repeats for r in result_rows(name, cells, repeats[name])]
    args.out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    print_table(rows)


if __name__ == "__main__":
    main()
