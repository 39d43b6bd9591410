"""What could verdicts without rows give at most, before any probe is learnt?

    python -m benchmarks.probe_bound --out bound.json

Four servers of the embedded pair take turns: the target alone, `exact` and `suffix`
(verdicts of the judge's question) of one PARSE server, and `free`: verdicts are made up
that keep the share of drafts which the question kept, and take no rows of a pass. So
`free` costs what a judge costs that is right and needs nothing. Prints output tokens a
second over the target's, medians over repeats, and seconds by stage; the texts of
`free` mean nothing. With --probe a server with that probe takes turns too.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import urllib.request
from collections import defaultdict
from pathlib import Path
from typing import Any

from sglang_parse.bench.load import Prompt, encode_prompts, load_tokenizer, measure
from sglang_parse.bench.provenance import provenance
from sglang_parse.bench.servers import ServerProcess, running
from sglang_parse.cli.demo import EVAL_SEED, SERVER_ARGS, WARM_UP_SEED
from sglang_parse.embedded import CONFIG_PATH, DRAFT_PATH, TARGET_PATH
from sglang_parse.embedded.task import make_problems
from sglang_parse.engine.simulated import FREE_ENV, KEEP_ENV

TARGET = ["--model-path", str(TARGET_PATH), *SERVER_ARGS]
PARSE = [
    *TARGET,
    *("--speculative-algorithm", "PARSE"),
    *("--speculative-draft-model-path", str(DRAFT_PATH)),
    *("--speculative-parse-config", str(CONFIG_PATH)),
]
# Arm -> (server, options of each request).
ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "target": ("target", {}),
    "exact": ("parse", {"parse_mode": "exact"}),
    "suffix": ("parse", {"parse_judge": "suffix"}),
    "free": ("free", {"parse_judge": "suffix"}),
}
PROBE_ARMS: dict[str, tuple[str, dict[str, Any]]] = {
    "probe": ("probe", {"parse_judge": "probe"}),
    "auto": ("probe", {"parse_judge": "auto"}),
}


def counters(server: ServerProcess) -> dict[str, Any]:
    with urllib.request.urlopen(server.url + "/server_info") as answer:
        states = json.load(answer)["internal_states"]
    found: dict[str, Any] = states[0].get("parse") or {}
    return found


def kept_share(folder: Path, warm_up: list[Prompt], num: int) -> float:
    """Share of judged draft tokens that the question keeps."""
    with ServerProcess(PARSE, "share", folder / "share.log") as server:
        tokenizer = load_tokenizer(str(TARGET_PATH))
        prompts = encode_prompts(tokenizer, make_problems(num, EVAL_SEED))
        measure(server.url, prompts, concurrency=8, warm_up=warm_up)
        found = counters(server)
    kept: int = found["kept_tokens"] - found["matched_tokens"]
    return kept / found["judged_tokens"]


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    tokenizer = load_tokenizer(str(TARGET_PATH))
    warm_up = encode_prompts(tokenizer, make_problems(16, WARM_UP_SEED))
    share = kept_share(folder, warm_up, args.problems)
    print(f"The question keeps {share:.1%} of judged draft tokens.", flush=True)
    commands = {"target": TARGET, "parse": PARSE}
    arms = ARMS
    if args.probe:
        commands["probe"] = [*PARSE, "--speculative-parse-probe", str(args.probe)]
        arms = ARMS | PROBE_ARMS
    servers = {
        name: ServerProcess(command, name, folder / f"{name}.log")
        for name, command in commands.items()
    }
    os.environ |= {KEEP_ENV: f"{share:.4f}", FREE_ENV: "1"}
    servers["free"] = ServerProcess(PARSE, "free", folder / "free.log")
    del os.environ[KEEP_ENV], os.environ[FREE_ENV]
    rates: dict[tuple[int, str], list[float]] = defaultdict(list)
    right: dict[tuple[int, str], list[bool]] = defaultdict(list)
    seconds: dict[str, dict[str, float]] = {}
    with running(list(servers.values())):
        for repeat in range(args.repeats):
            for c in args.concurrency:
                num = max(args.problems, 2 * c)
                problems = make_problems(num, EVAL_SEED + repeat)
                prompts = encode_prompts(tokenizer, problems)
                for arm, (name, custom) in arms.items():
                    server = servers[name]
                    before = counters(server).get("stage_seconds", {})
                    found = measure(
                        server.url,
                        prompts,
                        concurrency=c,
                        warm_up=warm_up if repeat == 0 else warm_up[:4],
                        custom_params=custom,
                    )
                    tokens = sum(r.num_tokens for r in found.results)
                    rates[c, arm].append(tokens / found.wall_s)
                    told = f"repeat {repeat}, {c} at a time, {arm}"
                    print(f"{told}: {rates[c, arm][-1]:.1f} tok/s", flush=True)
                    right[c, arm] += [r.correct for r in found.results]
                    after = counters(server).get("stage_seconds", {})
                    spent = seconds.setdefault(f"{arm} at {c}", defaultdict(float))
                    for stage, total in after.items():
                        spent[stage] += total - before.get(stage, 0.0)
    rows = []
    for c in args.concurrency:
        for arm in arms:
            pairs = zip(rates[c, arm], rates[c, "target"], strict=True)
            answers = right[c, arm]
            rows.append(
                {
                    "concurrency": c,
                    "arm": arm,
                    "tok_s": statistics.median(rates[c, arm]),
                    "ratio": statistics.median(a / b for a, b in pairs),
                    "accuracy": None if arm == "free" else sum(answers) / len(answers),
                    "stage_seconds": dict(seconds[f"{arm} at {c}"]),
                }
            )
            print(json.dumps(rows[-1]), flush=True)
    return {"kept_share": share, "repeats": args.repeats, "rows": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, help="write the figures as JSON")
    parser.add_argument("--problems", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--concurrency", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--probe", type=Path, help="a probe to take turns with")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="probe-bound-") as folder:
        found = run(args, Path(folder)) | {"provenance": provenance()}
    if args.out:
        args.out.write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
