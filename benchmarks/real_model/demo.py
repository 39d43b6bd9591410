"""A real model in exact mode and with EAGLE-3, beside its target alone."""

from __future__ import annotations

import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress
from rich.table import Table

from benchmarks.provenance import provenance
from benchmarks.real_model import RealModels, real_models
from benchmarks.real_model.prompts import conversations
from sglang_parse.cli.demo_run import SERVER_ARGS, progress_bar, table_column
from sglang_parse.demo.figures import ArmSummary, RequestResult, summarise
from sglang_parse.demo.load import Prompt, load_tokenizer, measure
from sglang_parse.demo.servers import ServerProcess, running

# Without the kind of 4,000 tokens, whose prefill would be most of the time.
KINDS = ("chat", "multi-turn", "code", "lists", "json", "unicode", "system")
MAX_NEW_TOKENS = 96
SERVER_THREADS = os.cpu_count() or 1
ROWS = ("output tok/s", "ratio to target", "latency p50/p95 s", "TTFT p50/p95 s")
DRAFT_NOTE = (
    "The draft is the target itself with coarser weights: as slow as the target, so "
    "PARSE soon serves most rounds without it. It shows exactness, not speed."
)


@dataclass(frozen=True)
class RealDemoOptions:
    #: How many conversations to ask, of seven kinds in turn.
    prompts: int = 16
    #: Requests in flight, one measurement each.
    concurrency: tuple[int, ...] = (1, 4)
    json_path: Path | None = None


@dataclass(frozen=True)
class RealArm:
    """One arm at one concurrency."""

    summary: ArmSummary
    #: Answers that equal the target's, token by token.
    num_same: int


def find_models() -> RealModels:
    """The real model's folders, with a bar on standard error while they are built."""
    console = Console(stderr=True)
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        tasks: dict[str, Any] = {}

        def advance(name: str, done: int, total: int) -> None:
            if name not in tasks:
                tasks[name] = bar.add_task(f"Unpacking the {name}", total=total)
            bar.update(tasks[name], completed=done)

        return real_models(partial(console.print, soft_wrap=True), advance)


def head_args(head: Path) -> list[str]:
    """Flags of a PARSE server with an EAGLE-3 head, which serves in exact mode."""
    compose = ["--speculative-parse-compose", "eagle3"]
    return [*compose, "--speculative-parse-eagle-model-path", str(head)]


def draft_args(draft: Path) -> list[str]:
    """Flags of a PARSE server in exact mode with a draft model."""
    exact = ["--speculative-parse-mode", "exact"]
    return [*exact, "--speculative-draft-model-path", str(draft)]


def arm_args(models: RealModels) -> dict[str, list[str]]:
    """Server flags per arm; the EAGLE-3 arm has no draft model."""
    target = ["--model-path", str(models.target), *SERVER_ARGS]
    parse = [*target, "--speculative-algorithm", "PARSE"]
    return {
        "target": target,
        "exact": [*parse, *draft_args(models.draft)],
        "eagle3": [*parse, *head_args(models.head)],
    }


def run_real_demo(options: RealDemoOptions) -> None:
    """Boot all arms, measure one at a time, show how equal and how fast they are.

    Raises ModelError, or ServerError or LoadError with the logs kept.
    """
    console = Console()
    start = time.monotonic()
    models = find_models()
    logs = Path(tempfile.mkdtemp(prefix="sglang-parse-demo-"))
    servers = {
        arm: ServerProcess(args, arm, logs / f"{arm}.log", num_threads=SERVER_THREADS)
        for arm, args in arm_args(models).items()
    }
    booting = f"Starting {len(servers)} servers (logs: {logs}/*.log) ..."
    console.print(booting, highlight=False, soft_wrap=True)
    prompts = encode(load_tokenizer(str(models.target)), options.prompts)
    with running(list(servers.values())):
        arms, answers = measure_arms(options, servers, prompts, console)
    shutil.rmtree(logs, ignore_errors=True)
    write_json(options, arms)
    console.print(results_table(arms))
    console.print("\nOne answer of PARSE:", style="bold")
    console.print(answers[0].text, soft_wrap=True, highlight=False, markup=False)
    console.print(f"\n{DRAFT_NOTE}", style="dim")
    show_command(console, models)
    console.print(f"\nTook {time.monotonic() - start:.0f} s.", highlight=False)


def encode(tokenizer: Any, count: int) -> list[Prompt]:
    """Conversations in the tokenizer's chat format, with short answers."""
    prompts = []
    for messages in conversations(count, KINDS):
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        ids = tokenizer.encode(text, add_special_tokens=False)
        prompts.append(Prompt(None, tuple(ids), MAX_NEW_TOKENS))
    return prompts


def measure_arms(
    options: RealDemoOptions,
    servers: dict[str, ServerProcess],
    prompts: Sequence[Prompt],
    console: Console,
) -> tuple[list[RealArm], Sequence[RequestResult]]:
    """All arms at each concurrency, and PARSE's answers at the last one."""
    arms: list[RealArm] = []
    results: Sequence[RequestResult] = ()
    for concurrency in options.concurrency:
        truth: Sequence[RequestResult] = ()
        baseline = None
        for name, server in servers.items():
            with progress_bar(console) as bar:
                title = f"{name:>12}, concurrency {concurrency:<2}"
                task = bar.add_task(title, total=len(prompts))
                measured = measure(
                    server.url,
                    prompts,
                    concurrency=concurrency,
                    warm_up=prompts[:concurrency],
                    on_answer=partial(bar.advance, task),
                )
            results = measured.results
            truth = truth or results
            rate = sum(r.num_tokens for r in results) / measured.wall_s
            baseline = baseline or rate
            summary = summarise(name, concurrency, results, measured.wall_s, baseline)
            arms.append(RealArm(summary, num_same(results, truth)))
    return arms, results


def num_same(ours: Sequence[RequestResult], truth: Sequence[RequestResult]) -> int:
    """How many answers have the same tokens."""
    pairs = zip(ours, truth, strict=True)
    return sum(a.token_ids == b.token_ids for a, b in pairs)


def results_table(arms: Sequence[RealArm]) -> Table:
    """One column per arm and concurrency; narrow enough for 80 characters."""
    count = arms[0].summary.problems
    table = Table(title=f"{count} prompts, SmolLM2-135M-Instruct", header_style="bold")
    table.add_column("concurrency", no_wrap=True)
    for arm in arms:
        s = arm.summary
        table.add_column(f"{s.concurrency}\n{s.arm}", justify="right")
    same = [f"{arm.num_same}/{count}" for arm in arms]
    table.add_row("equal to target", *same)
    columns = [table_column(arm.summary) for arm in arms]
    for row in (*ROWS, "kept tokens/pass", "passes/answer"):
        table.add_row(row, *(column[row] for column in columns))
    return table


def show_command(console: Console, models: RealModels) -> None:
    """How to start a server of the last arm."""
    command = (
        f"{sys.executable} -m sglang.launch_server --model-path {models.target} "
        f"--speculative-algorithm PARSE {' '.join(head_args(models.head))}"
    )
    console.print("\nStart the server by hand:", style="bold")
    console.print(command, soft_wrap=True, highlight=False, markup=False)


def write_json(options: RealDemoOptions, arms: Sequence[RealArm]) -> None:
    """The figures as data, if a file was asked for."""
    if options.json_path is None:
        return
    rows = [asdict(a.summary) | {"equal_to_target": a.num_same} for a in arms]
    data = {"arms": rows, "provenance": provenance()}
    text = json.dumps(data, indent=2) + "\n"
    options.json_path.write_text(text, encoding="utf-8")
