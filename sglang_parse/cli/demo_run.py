"""`sglang-parse demo`: PARSE against its target alone, on real servers."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from sglang_parse.cli import trace_text
from sglang_parse.demo.figures import ArmSummary, RequestResult, summarise
from sglang_parse.demo.load import (
    Prompt,
    ask_with_report,
    encode_prompts,
    load_tokenizer,
    measure,
)
from sglang_parse.demo.servers import ServerProcess, running
from sglang_parse.embedded import CONFIG_PATH, DRAFT_PATH, HEAD_PATH, TARGET_PATH
from sglang_parse.embedded.task import make_problems

EVAL_SEED, WARM_UP_SEED = 64, 65  # of task.make_problems, split "eval"
MANUAL_PORT = 30000
# One pool size for all arms, so that their servers fit on one GPU.
SERVER_ARGS = ("--max-total-tokens", "32768", "--max-running-requests", "32")


@dataclass(frozen=True)
class DemoOptions:
    """What to measure. Problems come from the held-out split of the embedded task."""

    problems: int = 64
    concurrency: tuple[int, ...] = (1, 8)
    target: str = str(TARGET_PATH)
    draft: str = str(DRAFT_PATH)
    compose: str = "none"
    head: str = str(HEAD_PATH)
    json_path: Path | None = None


def arm_args(options: DemoOptions) -> dict[str, list[str]]:
    """Server flags per arm; the target arm is stock SGLang with the target model.

    Composed, EAGLE-3 is shown alone (no draft model, so token by token) and with PARSE.
    """
    target = ["--model-path", options.target, *SERVER_ARGS]
    arms = {"target": target, "parse": target + parse_args(options)}
    if options.compose == "eagle3":
        head = ["--speculative-parse-compose", "eagle3"]
        head += ["--speculative-parse-eagle-model-path", options.head]
        arms["eagle3"] = [*target, "--speculative-algorithm", "PARSE", *head]
        arms["parse-eagle3"] = target + parse_args(options) + head
    return arms


def parse_args(options: DemoOptions) -> list[str]:
    args = ["--speculative-draft-model-path", options.draft]
    args += ["--speculative-algorithm", "PARSE"]
    if options.target == str(TARGET_PATH):
        args += ["--speculative-parse-config", str(CONFIG_PATH)]
    return args


def run_demo(options: DemoOptions) -> None:
    """Boot all arms, measure one at a time, show table, answer and commands.

    Raises ServerError or LoadError with the logs kept; they are removed otherwise.
    """
    console = Console()
    start = time.monotonic()
    logs = Path(tempfile.mkdtemp(prefix="sglang-parse-demo-"))
    servers = {
        arm: ServerProcess(args, arm, logs / f"{arm}.log")
        for arm, args in arm_args(options).items()
    }
    booting = f"Starting {len(servers)} servers (logs: {logs}/*.log) ..."
    console.print(booting, highlight=False, soft_wrap=True)
    with running(list(servers.values())):
        booted = ", ".join(
            f"{s.name} after {s.ready_s:.0f} s" for s in servers.values()
        )
        console.print(f"Ready: {booted}.", highlight=False)
        tokenizer = load_tokenizer(options.target)
        problems = make_problems(options.problems, EVAL_SEED)
        prompts = encode_prompts(tokenizer, problems)
        warm_up = encode_prompts(tokenizer, make_problems(8, WARM_UP_SEED))
        summaries, answers = measure_arms(options, servers, prompts, warm_up, console)
        telling = trace_text.most_telling(answers)
        answer = ask_with_report(servers["parse"].url, prompts[telling])
    shutil.rmtree(logs, ignore_errors=True)
    write_json(options, summaries)
    for table in results_tables(summaries):
        console.print(table)
    question = problems[telling].prompt
    show_answer(console, question, answer)
    show_commands(console, options, question)
    console.print(f"\nTook {time.monotonic() - start:.0f} s.", highlight=False)


def measure_arms(
    options: DemoOptions,
    servers: dict[str, ServerProcess],
    prompts: Sequence[Prompt],
    warm_up: Sequence[Prompt],
    console: Console,
) -> tuple[list[ArmSummary], Sequence[RequestResult]]:
    """Summaries in table order, and PARSE's answers at the first concurrency.

    While one arm is measured the other servers sleep.
    """
    summaries: list[ArmSummary] = []
    answers: Sequence[RequestResult] = ()
    for concurrency in options.concurrency:
        baseline = None
        for arm, server in servers.items():
            title = f"{arm:>12}, concurrency {concurrency:<2}"
            with progress_bar(console) as bar:
                task = bar.add_task(title, total=len(prompts))
                measured = measure(
                    server.url,
                    prompts,
                    concurrency=concurrency,
                    warm_up=warm_up,
                    on_answer=partial(bar.advance, task),
                )
            results, wall_s = measured.results, measured.wall_s
            summary = summarise(arm, concurrency, results, wall_s, baseline)
            if arm == "target":
                baseline = summary.output_tok_s
                summary = summarise(arm, concurrency, results, wall_s, baseline)
            elif arm == "parse" and not answers:
                answers = results
            summaries.append(summary)
    return summaries, answers


def progress_bar(console: Console) -> Progress:
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


def results_tables(summaries: Sequence[ArmSummary]) -> list[Table]:
    """One per concurrency, a column per arm."""
    steps = dict.fromkeys(s.concurrency for s in summaries)
    groups = [[s for s in summaries if s.concurrency == c] for c in steps]
    tables = []
    for group in groups:
        table = Table(title=f"{group[0].problems} problems", header_style="bold")
        table.add_column(f"concurrency {group[0].concurrency}", no_wrap=True)
        for s in group:
            style = "green" if s.arm.startswith("parse") else None
            table.add_column(s.arm, justify="right", style=style)
        columns = [table_column(s) for s in group]
        for row in columns[0]:
            table.add_row(row, *(column[row] for column in columns))
        tables.append(table)
    return tables


def table_column(s: ArmSummary) -> dict[str, str]:
    """Figures of one arm as shown, by the name of their row."""
    return {
        "accuracy": f"{s.accuracy:.1%}",
        "  95% interval": f"{100 * s.accuracy_low:.1f}-{s.accuracy_high:.1%}",
        "output tok/s": f"{s.output_tok_s:.1f}",
        "ratio to target": "-" if s.ratio is None else f"{s.ratio:.2f}x",
        "requests/s": f"{s.requests_s:.2f}",
        "latency p50/p95 s": f"{s.latency_p50_s:.2f} / {s.latency_p95_s:.2f}",
        "TTFT p50/p95 s": f"{s.ttft_p50_s:.2f} / {s.ttft_p95_s:.2f}",
        "kept tokens/pass": (
            "-" if s.kept_per_pass is None else f"{s.kept_per_pass:.1f}"
        ),
        "passes/answer": f"{s.passes_per_answer:.1f}",
    }


def show_answer(console: Console, question: str, answer: RequestResult) -> None:
    console.print("\nOne answer of PARSE:", style="bold")
    console.print(question, style="italic", soft_wrap=True)
    marks = console.color_system is None
    spans = trace_text.answer_spans(answer.text, answer.report or {})
    console.print(trace_text.draw_answer(spans, marks=marks), soft_wrap=True, end="")
    console.print(trace_text.legend(marks=marks), soft_wrap=True)


def show_commands(console: Console, options: DemoOptions, question: str) -> None:
    for title, command in zip(
        ("Start the server by hand:", "Ask it with curl:"),
        manual_commands(options, question),
        strict=True,
    ):
        console.print(f"\n{title}", style="bold")
        console.print(command, soft_wrap=True, highlight=False, markup=False)


def manual_commands(options: DemoOptions, question: str) -> tuple[str, str]:
    """Shell commands that start the server, and ask it with curl."""
    launch = [sys.executable, "-m", "sglang.launch_server"]
    models = ["--model-path", options.target, *parse_args(options)]
    server = shlex.join([*launch, *models, "--port", str(MANUAL_PORT)])
    messages = [{"role": "user", "content": question}]
    data = json.dumps({"model": "default", "messages": messages, "temperature": 0})
    curl = (
        f"curl -s http://127.0.0.1:{MANUAL_PORT}/v1/chat/completions "
        f"-H 'Content-Type: application/json' -d {shlex.quote(data)}"
    )
    return "OMP_NUM_THREADS=1 " + server, curl


def write_json(options: DemoOptions, summaries: Sequence[ArmSummary]) -> None:
    """The figures as data, if a file was asked for."""
    if options.json_path is None:
        return
    data = {
        "arms": [s.as_dict() for s in summaries],
        "target": options.target,
        "draft": options.draft,
        "head": options.head if options.compose == "eagle3" else None,
    }
    options.json_path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
