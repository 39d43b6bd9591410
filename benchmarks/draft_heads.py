"""What does a head of the draft model give, and what does one cost that never agrees?

    python -m benchmarks.draft_heads --out benchmarks/results/draft_heads.jsonl

Servers of the embedded pair, with adaptive windows: without a head, with the draft's
trained head, and with one whose output rows are shuffled. They take turns; a row has
the time and the processor time of one arm's answers.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from benchmarks.provenance import provenance
from sglang_parse.cli.demo_run import EVAL_SEED, SERVER_ARGS, WARM_UP_SEED
from sglang_parse.demo.figures import summarise
from sglang_parse.demo.load import encode_prompts, load_tokenizer, measure
from sglang_parse.demo.servers import ServerProcess, running
from sglang_parse.embedded import DRAFT_HEAD_PATH, DRAFT_PATH, TARGET_PATH
from sglang_parse.embedded.task import make_problems

ARMS = ("none", "ngram", "trained", "shuffled")
# Enough for a first trial of all lengths at each number of requests.
WARM_UP = 48


def shuffled_head(folder: Path) -> Path:
    """A copy of the head that never says what it means."""
    path = folder / "shuffled"
    shutil.copytree(DRAFT_HEAD_PATH, path)
    weights = load_file(path / "model.safetensors")
    rows = torch.randperm(640, generator=torch.Generator().manual_seed(1))
    weights["lm_head.weight"] = weights["lm_head.weight"][rows].contiguous()
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path


def flags_of(arm: str, shuffled: Path) -> list[str]:
    flags = ["--model-path", str(TARGET_PATH), *SERVER_ARGS]
    flags += ["--speculative-algorithm", "PARSE"]
    flags += ["--speculative-draft-model-path", str(DRAFT_PATH)]
    if arm in ("none", "ngram"):
        return [*flags, "--speculative-parse-draft-compose", arm]
    path = DRAFT_HEAD_PATH if arm == "trained" else shuffled
    flags += ["--speculative-parse-draft-compose", "eagle3"]
    return [*flags, "--speculative-parse-draft-eagle-model-path", str(path)]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--problems", type=int, default=48)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--arms", nargs="+", choices=ARMS, default=list(ARMS))
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = load_tokenizer(str(TARGET_PATH))
    ratios: dict[tuple[int, str, str], list[float]] = {}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shuffled = shuffled_head(folder)
        servers = {
            arm: ServerProcess(flags_of(arm, shuffled), arm, folder / f"{arm}.log")
            for arm in args.arms
        }
        with running(list(servers.values())), args.out.open("a") as out:
            for concurrency in args.concurrency:
                some = make_problems(WARM_UP, WARM_UP_SEED)
                for arm in args.arms:
                    warm = encode_prompts(tokenizer, some)
                    measure(servers[arm].url, warm, concurrency=concurrency)
                for repeat in range(args.repeats):
                    problems = make_problems(args.problems, EVAL_SEED + repeat)
                    prompts = encode_prompts(tokenizer, problems)
                    speeds: dict[str, tuple[float, float]] = {}
                    turn = repeat % len(args.arms)
                    for arm in args.arms[turn:] + args.arms[:turn]:
                        before = servers[arm].cpu_s()
                        found = measure(
                            servers[arm].url, prompts, concurrency=concurrency
                        )
                        cpu = servers[arm].cpu_s() - before
                        summary = summarise(
                            arm, concurrency, found.results, found.wall_s
                        )
                        speeds[arm] = (
                            summary.output_tok_s,
                            summary.output_tokens / cpu,
                        )
                        row = {"repeat": repeat, "cpu_s": cpu, **summary.as_dict()}
                        out.write(json.dumps(row | provenance()) + "\n")
                        out.flush()
                    for arm, both in speeds.items():
                        for k, what in enumerate(("time", "processor time")):
                            ratio = both[k] / speeds[args.arms[0]][k]
                            key = concurrency, what, arm
                            ratios.setdefault(key, []).append(ratio)
    for (concurrency, what, arm), found in ratios.items():
        low, middle, high = min(found), statistics.median(found), max(found)
        print(f"{concurrency} {what} {arm} {middle:.2f} ({low:.2f} to {high:.2f})")


if __name__ == "__main__":
    main()
