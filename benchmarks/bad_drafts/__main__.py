"""What a bad draft server costs: `python -m benchmarks.bad_drafts --out FILE`.

Two real servers of the embedded target are up, stock SGLang and PARSE with a draft
server. That draft server is ours, and misbehaves in one way after the other. In each
case both servers answer the same prompts in turn, PARSE in each of its modes. Before
each case the draft server streams the target's own answers until they are used again.
A line of the result says how much longer a token took than without a draft, by the
clock and in CPU time of the whole server, and whether the answers are the target's.
Other programs on the machine stretch the first, and not the second.

The draft server runs on the core that `--draft-cpu` names: elsewhere it would take time
from the two others, as no server on another machine does.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.bad_drafts.server import CASES, draft_server
from benchmarks.provenance import provenance
from sglang_parse.demo.figures import RequestResult
from sglang_parse.demo.load import (
    Prompt,
    encode_prompts,
    load_tokenizer,
    measure,
)
from sglang_parse.demo.servers import HOST, ServerProcess, free_port, running
from sglang_parse.embedded import TARGET_PATH
from sglang_parse.embedded.task import make_problems

# `off` takes no draft: what PARSE itself costs, whatever the draft server does.
MODES = ("off", "exact", "semantic")
# Prompts of a turn: so many, or two for each request at a time.
TURN_PROMPTS = 4
# Seconds that the server has to use drafts again, once they are right again.
RECOVERY_S = 120.0
KILLED = "killed"


@dataclass
class Asked:
    """Answers of a server, with the milliseconds they took by the clock and of CPU."""

    results: list[RequestResult] = field(default_factory=list)
    ms: float = 0.0
    cpu_ms: float = 0.0

    def add(self, other: Asked) -> None:
        self.results += other.results
        self.ms += other.ms
        self.cpu_ms += other.cpu_ms

    @property
    def num_tokens(self) -> int:
        return sum(one.num_tokens for one in self.results)

    @property
    def ms_a_token(self) -> float:
        return self.ms / self.num_tokens

    @property
    def cpu_ms_a_token(self) -> float:
        return self.cpu_ms / self.num_tokens


class Bench:
    """Two servers and what their answers cost."""

    def __init__(
        self, args: argparse.Namespace, servers: dict[str, ServerProcess]
    ) -> None:
        self.servers = servers
        tokenizer = load_tokenizer(str(TARGET_PATH))
        problems = make_problems(args.prompts, seed=args.seed)
        self.prompts = encode_prompts(tokenizer, problems)
        self.texts = [tokenizer.decode(p.input_ids) for p in self.prompts]
        own = self.ask("target", self.prompts, 8).results
        self.own = [one.token_ids for one in own]
        self.answers = dict(zip(self.texts, (one.text for one in own), strict=True))

    def ask(
        self, name: str, prompts: Sequence[Prompt], concurrency: int, mode: str = ""
    ) -> Asked:
        server = self.servers[name]
        before = server.cpu_s()
        found = measure(
            server.url,
            prompts,
            concurrency=concurrency,
            custom_params={"parse_mode": mode} if mode else None,
        )
        cpu_s = server.cpu_s() - before
        return Asked(list(found.results), 1e3 * found.wall_s, 1e3 * cpu_s)

    def recover(self) -> None:
        """Wait until right drafts are used, so that the server trusts them again."""
        end = time.monotonic() + RECOVERY_S
        while time.monotonic() < end:
            found = self.ask("parse", self.prompts[:4], 1, "exact")
            if all(drafted(one) for one in found.results):
                return
        print("The server did not use right drafts again.", flush=True)

    def rows(self, case: str, concurrency: int, lap: int) -> Iterator[dict[str, Any]]:
        base = Asked()
        modes = {mode: Asked() for mode in MODES}
        num = max(TURN_PROMPTS, 2 * concurrency)
        for start in range(0, len(self.prompts), num):
            prompts = self.prompts[start : start + num]
            base.add(self.ask("target", prompts, concurrency))
            for mode, asked in modes.items():
                asked.add(self.ask("parse", prompts, concurrency, mode))
        for mode, asked in modes.items():
            results = asked.results
            pairs = zip(results, self.own, strict=True)
            row = {
                "case": case,
                "mode": mode,
                "concurrency": concurrency,
                "lap": lap,
                "answers": len(results),
                "equal": sum(one.token_ids == own for one, own in pairs),
                "right": sum(one.correct for one in results),
                "drafted": sum(map(drafted, results)),
                "target_ms_a_token": round(base.ms_a_token, 3),
                "target_cpu_ms_a_token": round(base.cpu_ms_a_token, 3),
                "times_longer": round(asked.ms_a_token / base.ms_a_token, 3),
                "cpu_times_longer": round(
                    asked.cpu_ms_a_token / base.cpu_ms_a_token, 3
                ),
            }
            print(json.dumps(row), flush=True)
            yield row | provenance()


def drafted(result: RequestResult) -> int:
    """Tokens that the draft server wrote for an answer."""
    return int((result.report or {}).get("drafted_by", {}).get("remote", 0))


def run(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    port = free_port()
    target = ("--model-path", str(TARGET_PATH), "--max-total-tokens", "16384")
    url = f"http://{HOST}:{port}/v1"
    parse = (*target, "--speculative-algorithm", "PARSE")
    parse += ("--speculative-parse-draft-url", url)
    with tempfile.TemporaryDirectory(prefix="sglang-parse-bad-") as folder:
        servers = [
            ServerProcess(flags, name, Path(folder) / f"{name}.log")
            for name, flags in (("target", target), ("parse", parse))
        ]
        with running(servers):
            bench = Bench(args, {one.name: one for one in servers})
            with draft_server(port, bench.answers, args.draft_cpu) as (process, case):
                for lap in range(args.laps):
                    for name in args.cases:
                        for concurrency in args.concurrency:
                            case.value = 0
                            bench.recover()
                            case.value = list(CASES).index(name)
                            yield from bench.rows(name, concurrency, lap)
                case.value = 0
                bench.recover()
                process.kill()
                process.join()
                for lap in range(args.laps):
                    for concurrency in args.concurrency:
                        yield from bench.rows(KILLED, concurrency, lap)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Medians over the laps, and the longest."""
    groups: dict[tuple[str, str, int], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[row["case"], row["mode"], row["concurrency"]].append(row)
    lines = [
        "| draft server | mode | requests | time a token, target = 1 | CPU time, "
        "the same | the target's answers | right answers |",
        "|---|---|---|---|---|---|---|",
    ]
    for (case, mode, concurrency), group in groups.items():
        total = sum(row["answers"] for row in group)
        lines.append(
            f"| {case} | {mode} | {concurrency} | {spread(group, 'times_longer')} "
            f"| {spread(group, 'cpu_times_longer')} "
            f"| {sum(row['equal'] for row in group)}/{total} "
            f"| {sum(row['right'] for row in group)}/{total} |"
        )
    return "\n".join(lines)


def spread(group: Sequence[dict[str, Any]], name: str) -> str:
    values = [row[name] for row in group]
    return f"{statistics.median(values):.2f} (at most {max(values):.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines, appended")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--laps", type=int, default=2)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--draft-cpu", type=int, help="default: any core")
    args = parser.parse_args()
    rows = []
    with args.out.open("a", encoding="utf-8") as out:
        for row in run(args):
            rows.append(row)
            out.write(json.dumps(row) + "\n")
            out.flush()
    print(table(rows))


if __name__ == "__main__":
    main()
