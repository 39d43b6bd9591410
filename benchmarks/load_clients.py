"""sglang.bench_serving, guidellm and aiperf, pointed at stock SGLang, NGRAM and PARSE.

    make load-clients ARGS="--out DIR"

Servers of the embedded pair run side by side and are asked in turns, one at a time.
Each tool reads the same questions from a file and writes its own figures, which are
kept as they are under DIR. A line of `rows.jsonl` has those that all three have.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from benchmarks.provenance import provenance
from sglang_parse.cli.demo_run import SERVER_ARGS, DemoOptions, parse_args
from sglang_parse.demo.servers import ServerProcess, running
from sglang_parse.embedded import TARGET_PATH
from sglang_parse.embedded.task import make_problems

TOKENS = 160
SHARED = ("output_tok_s", "ttft_ms", "tpot_ms", "latency_ms")
BASE = ["--model-path", str(TARGET_PATH), *SERVER_ARGS]
ARMS = {
    "stock": BASE,
    "ngram": [*BASE, "--speculative-algorithm", "NGRAM"],
    "parse": BASE + parse_args(DemoOptions()),
}
Figures = tuple[dict[str, Any], dict[str, float]]


def bench_serving(url: str, num: int, at_once: int, work: Path, tool: Path) -> Figures:
    rows = work / "bench_serving.jsonl"
    run(
        *(sys.executable, "-m", "sglang.bench_serving", "--backend", "sglang-oai-chat"),
        *("--base-url", url, "--tokenizer", str(TARGET_PATH), "--model", "default"),
        *("--dataset-name", "custom", "--dataset-path", str(work / "chats.jsonl")),
        *("--num-prompts", str(num), "--max-concurrency", str(at_once)),
        *("--sharegpt-output-len", str(TOKENS), "--warmup-requests", "2"),
        *("--extra-request-body", '{"temperature": 0, "ignore_eos": false}'),
        *("--output-file", str(rows)),
    )
    raw = json.loads(rows.read_text())
    # It takes the requested length of a chat's answer for its number of tokens.
    written = raw["total_output_tokens_retokenized"]
    too_many = raw["total_output_tokens"] / written
    figures = (
        written / raw["duration"],
        raw["mean_ttft_ms"],
        raw["mean_tpot_ms"] * too_many,
        raw["mean_e2e_latency_ms"],
    )
    return raw, dict(zip(SHARED, figures, strict=True))


def guidellm(url: str, num: int, at_once: int, work: Path, tool: Path) -> Figures:
    extras = {"body": {"temperature": 0, "max_tokens": TOKENS}}
    backend = {"kind": "openai_http", "target": url, "model": "default"}
    out = work / "guidellm.json"
    run(
        *(str(tool), "run", "--backend", json.dumps(backend | {"extras": extras})),
        *("--profile", f"kind=concurrent,streams={at_once}"),
        *("--constraint", f"kind=max_requests,count={num}"),
        *("--data", f"kind=json_file,path={work / 'questions.jsonl'}"),
        *("--tokenizer", f"kind=huggingface_auto,model={TARGET_PATH}"),
        *("--output", f"kind=json,path={out}", "--disable-console"),
    )
    (one,) = json.loads(out.read_text())["benchmarks"]
    raw = one["metrics"]
    means = [
        raw[name]["successful"]["mean"] * scale
        for name, scale in (
            ("output_tokens_per_second", 1),
            ("time_to_first_token_ms", 1),
            ("time_per_output_token_ms", 1),
            ("request_latency", 1000),
        )
    ]
    return raw, dict(zip(SHARED, means, strict=True))


def aiperf(url: str, num: int, at_once: int, work: Path, tool: Path) -> Figures:
    run(
        *(str(tool), "profile", "--model", "default", "--url", url, "--streaming"),
        *("--endpoint-type", "chat", "--tokenizer", str(TARGET_PATH)),
        *("--input-file", str(work / "texts.jsonl")),
        *("--custom-dataset-type", "single_turn"),
        *("--concurrency", str(at_once), "--request-count", str(num)),
        *("--warmup-request-count", "2", "--use-server-token-count"),
        *("--extra-inputs", json.dumps({"temperature": 0, "max_tokens": TOKENS})),
        *("--artifact-dir", str(work), "--ui", "none"),
    )
    raw = json.loads((work / "profile_export_aiperf.json").read_text())
    names = (
        *("output_token_throughput", "time_to_first_token"),
        *("inter_token_latency", "request_latency"),
    )
    return raw, dict(zip(SHARED, (raw[n]["avg"] for n in names), strict=True))


TOOLS: dict[str, Callable[..., Figures]] = {
    "bench_serving": bench_serving,
    "guidellm": guidellm,
    "aiperf": aiperf,
}


def run(*command: str) -> None:
    """Raises RuntimeError with the end of its output if it fails."""
    done = subprocess.run(
        command,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )
    if done.returncode:
        raise RuntimeError(f"{Path(command[0]).name} failed: {done.stdout[-2000:]}")


def write_questions(work: Path, num: int) -> None:
    """The same problems in the form of each tool."""
    forms: Mapping[str, Callable[[str], dict[str, Any]]] = {
        "questions": lambda q: {"prompt": q},
        "texts": lambda q: {"text": q},
        "chats": lambda q: {
            "conversations": [{"value": q}, {"value": "Answer: 1"}],
        },
    }
    problems = make_problems(num, seed=5)
    for name, form in forms.items():
        lines = (json.dumps(form(p.prompt)) + "\n" for p in problems)
        (work / f"{name}.jsonl").write_text("".join(lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder to write")
    parser.add_argument("--guidellm", type=Path, help="its program")
    parser.add_argument("--aiperf", type=Path, help="its program")
    parser.add_argument("--tools", nargs="+", choices=TOOLS, default=list(TOOLS))
    here = [arm for arm in ARMS if arm != "ngram" or torch.cuda.is_available()]
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=here)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--requests", type=int, default=32, help="of each run")
    parser.add_argument("--turns", type=int, default=1)
    options = parser.parse_args()
    if set(options.arms) - set(here):
        parser.error(
            "argument --arms: ngram needs a CUDA device, because its worker imports "
            "sgl_kernel, whose wheel cannot be loaded without CUDA"
        )
    options.out.mkdir(parents=True, exist_ok=True)
    logs = Path(tempfile.mkdtemp(prefix="load-clients-"))
    servers = {a: ServerProcess(ARMS[a], a, logs / f"{a}.log") for a in options.arms}
    with running(list(servers.values())):
        for turn in range(options.turns):
            for name in options.tools:
                for at_once in options.concurrency:
                    for arm, server in servers.items():
                        work = Path(tempfile.mkdtemp(dir=logs))
                        write_questions(work, options.requests)
                        tool = getattr(options, name, None)
                        raw, shared = TOOLS[name](
                            server.url, options.requests, at_once, work, tool
                        )
                        where = f"{name}-{arm}-{at_once}-{turn}"
                        (options.out / f"{where}.json").write_text(
                            json.dumps(raw, separators=(",", ":")) + "\n"
                        )
                        row = {"tool": name, "arm": arm, "concurrency": at_once}
                        row |= {k: round(v, 2) for k, v in shared.items()}
                        print(json.dumps(row), flush=True)
                        with (options.out / "rows.jsonl").open("a") as f:
                            f.write(json.dumps(row | {"turn": turn}) + "\n")
    (options.out / "provenance.json").write_text(json.dumps(provenance()) + "\n")
    shutil.rmtree(logs, ignore_errors=True)


if __name__ == "__main__":
    main()
