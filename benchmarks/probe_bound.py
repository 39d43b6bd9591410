"""What do verdicts without rows give, and what could they give at most?

    python -m benchmarks.probe_bound --out benchmarks/results/probe.json

Servers of the embedded pair take turns: the target alone, its EAGLE-3 head alone, one
PARSE server without a probe (`exact`, `suffix`) and one with the shipped probe
(`probe`, `auto`). Prints output tokens a second over the target's, medians over
repeats, rows of judged passes, and seconds by stage.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
import urllib.request
from collections import Counter, defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.provenance import provenance
from benchmarks.train_probe.embedded import PROBE_PATH
from sglang_parse.cli.demo_run import EVAL_SEED, SERVER_ARGS, WARM_UP_SEED
from sglang_parse.demo.load import Prompt, encode_prompts, load_tokenizer, measure
from sglang_parse.demo.servers import ServerProcess, running
from sglang_parse.embedded import (
    CONFIG_PATH,
    DRAFT_PATH,
    HEAD_PATH,
    TARGET_PATH,
)
from sglang_parse.embedded.task import make_problems

TARGET = ("--model-path", str(TARGET_PATH), *SERVER_ARGS)
PARSE = (
    *TARGET,
    *("--speculative-algorithm", "PARSE"),
    *("--speculative-parse-client-options", "all"),
    *("--speculative-draft-model-path", str(DRAFT_PATH)),
    *("--speculative-parse-config", str(CONFIG_PATH)),
)
EAGLE3 = (
    *TARGET,
    *("--speculative-algorithm", "PARSE"),
    *("--speculative-parse-compose", "eagle3"),
    *("--speculative-parse-eagle-model-path", str(HEAD_PATH)),
)
# Arm -> (server, options of each request).
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "target": ("target", {}),
    "eagle3": ("eagle3", {}),
    "exact": ("parse", {"parse_mode": "exact"}),
    "suffix": ("parse", {"parse_judge": "suffix"}),
    "probe": ("probe", {"parse_judge": "probe"}),
}
WARM_UPS = 16


@dataclass
class Cell:
    """What one arm gave at one concurrency; lists have an entry a repeat."""

    tok_s: list[float] = field(default_factory=list)
    right: list[bool] = field(default_factory=list)
    seconds: Counter[str] = field(default_factory=Counter)
    rows: Counter[str] = field(default_factory=Counter)
    num_tokens: int = 0

    @property
    def rows_over_draft(self) -> float | None:
        """Rows of judged passes over those of the same drafts without verdicts."""
        draft = self.rows["draft"]
        return (draft + self.rows["verdict"]) / draft if draft else None


Cells = dict[tuple[int, str], Cell]


def counters(server: ServerProcess) -> dict[str, Any]:
    """The counters of a PARSE server, {} of another."""
    with urllib.request.urlopen(server.url + "/server_info") as answer:
        states = json.load(answer)["internal_states"]
    found: dict[str, Any] = states[0].get("parse") or {}
    return found


def commands(probe: Path, arms: Mapping[str, tuple[str, Any]]) -> dict[str, list[str]]:
    """The flags of the servers that these arms need."""
    known = {
        "target": TARGET,
        "eagle3": EAGLE3,
        "parse": PARSE,
        "probe": (*PARSE, "--speculative-parse-probe", str(probe)),
    }
    used = {name for name, _ in arms.values()}
    return {name: list(flags) for name, flags in known.items() if name in used}


def measure_cell(
    cell: Cell,
    server: ServerProcess,
    prompts: list[Prompt],
    *,
    concurrency: int,
    warm_up: list[Prompt],
    options: dict[str, Any],
) -> None:
    """One arm once, added to its cell."""
    before = counters(server)
    found = measure(
        server.url,
        prompts,
        concurrency=concurrency,
        warm_up=warm_up,
        custom_params=options,
    )
    after = counters(server)
    num = sum(r.num_tokens for r in found.results)
    cell.num_tokens += num
    cell.tok_s.append(num / found.wall_s)
    cell.right += [r.correct for r in found.results]
    for name, sums in (("stage_seconds", cell.seconds), ("pass_rows", cell.rows)):
        for key, total in after.get(name, {}).items():
            sums[key] += total - before.get(name, {}).get(key, 0)


def measure_all(
    args: argparse.Namespace,
    servers: Mapping[str, ServerProcess],
    warm_up: list[Prompt],
) -> Cells:
    """All arms in turns, as often as the time allows."""
    tokenizer = load_tokenizer(str(TARGET_PATH))
    cells: Cells = defaultdict(Cell)
    started = time.monotonic()
    for repeat in range(args.repeats):
        spent = time.monotonic() - started
        if repeat and spent * (repeat + 1) / repeat > 60 * args.minutes:
            break
        for c in args.concurrency:
            num = max(args.problems, 6 * c)
            problems = make_problems(num, EVAL_SEED + repeat)
            prompts = encode_prompts(tokenizer, problems)
            for arm in args.arms:
                name, options = ARMS[arm]
                measure_cell(
                    cells[c, arm],
                    servers[name],
                    prompts,
                    concurrency=c,
                    warm_up=warm_up if repeat == 0 else warm_up[:4],
                    options=options,
                )
                told = f"repeat {repeat}, {c} at a time, {arm}"
                print(f"{told}: {cells[c, arm].tok_s[-1]:.1f} tok/s", flush=True)
    return cells


def row_of(cells: Cells, c: int, arm: str) -> dict[str, Any]:
    """The figures of one arm at one concurrency."""
    cell = cells[c, arm]

    def over(other: str) -> float | None:
        base = cells[c, other].tok_s if (c, other) in cells else []
        ratios = [a / b for a, b in zip(cell.tok_s, base, strict=False)]
        return statistics.median(ratios) if ratios else None

    return {
        "concurrency": c,
        "arm": arm,
        "tok_s": cell.tok_s,
        "over_target": over("target"),
        "over_eagle3": over("eagle3"),
        "over_exact": over("exact"),
        "accuracy": statistics.mean(cell.right),
        "problems": len(cell.right),
        "rows_over_draft": cell.rows_over_draft,
        "us_per_token": {
            stage: round(1e6 * s / cell.num_tokens) for stage, s in cell.seconds.items()
        },
    }


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Start the servers, measure, and return the figures."""
    tokenizer = load_tokenizer(str(TARGET_PATH))
    warm_up = encode_prompts(tokenizer, make_problems(WARM_UPS, WARM_UP_SEED))
    arms = {arm: ARMS[arm] for arm in args.arms}
    servers = {
        name: ServerProcess(command, name, folder / f"{name}.log")
        for name, command in commands(args.probe, arms).items()
    }
    with running(list(servers.values())):
        cells = measure_all(args, servers, warm_up)
    rows = [row_of(cells, c, arm) for c in args.concurrency for arm in args.arms]
    for row in rows:
        print(json.dumps(row), flush=True)
    return {"rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--problems", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=3, help="at most")
    parser.add_argument(
        "--minutes", type=float, default=30, help="no repeat ends later, but the first"
    )
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--arms", nargs="+", choices=list(ARMS), default=list(ARMS))
    parser.add_argument("--probe", type=Path, default=PROBE_PATH)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="probe-bound-") as folder:
        found = run(args, Path(folder)) | {"provenance": provenance()}
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
