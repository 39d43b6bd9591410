"""Does judging K prefixes in one pass beat one ordinary request per prefix?

    python benchmarks/bench_verify.py --out benchmarks/results/verify.json

Boots the embedded pair's PARSE server and judges the same answers by two routes in
turn: `parse_verify`, and `forks`, the SGLang program that one would write without PARSE
(`s.fork`, a request per prefix, scored by log-probabilities). Both share prefixes in
the radix cache and start from an empty one. Reports wall times (quartiles), passes
counted by the server, and the largest difference between scores.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import tempfile
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

import sglang as sgl
from transformers import AutoTokenizer

from benchmarks.embedded_answers import render_answer
from benchmarks.provenance import provenance
from sglang_parse import parse_verify
from sglang_parse.demo.servers import ServerProcess
from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from sglang_parse.embedded.task import make_problems
from sglang_parse.judging.prompt import build_judge_prompt
from sglang_parse.options.server import ParseConfig

SERVER = (
    *("--model-path", str(TARGET_PATH), "--speculative-algorithm", "PARSE"),
    *("--speculative-draft-model-path", str(DRAFT_PATH)),
)
TOKENIZER = AutoTokenizer.from_pretrained(str(TARGET_PATH))
CONFIG = ParseConfig()
JUDGE = build_judge_prompt(TOKENIZER, CONFIG.judge_suffix, CONFIG.verdict_pairs)
SUFFIX = TOKENIZER.decode(JUDGE.suffix)
TRIALS = 12
ROUTES = ("one_pass", "forks")
TOP = 20  # log-probabilities asked for; the verdict tokens are among them


@sgl.function
def judge(s, question, parts):
    s += sgl.user(question)
    s += sgl.assistant(parse_verify("check", parts))


@sgl.function
def judge_by_forks(s, question, parts, suffix):
    s += sgl.user(question)
    s += sgl.assistant_begin()
    forks = s.fork(len(parts))
    for k, fork in enumerate(forks):
        fork += "".join(parts[: k + 1]) + suffix
        fork += sgl.gen(
            "verdict",
            max_tokens=1,
            temperature=0,
            return_logprob=True,
            top_logprobs_num=TOP,
        )
    s["scores"] = [fork_score(fork.get_meta_info("verdict")) for fork in forks]


def fork_score(meta_info: dict[str, Any]) -> float:
    """P(yes) / (P(yes) + P(no)) from the likeliest tokens."""
    (yes, no) = JUDGE.verdict_ids[0]
    given = {t: lp for lp, t, *_ in meta_info["output_top_logprobs"][0]}
    return 1 / (1 + math.exp(given.get(no, -math.inf) - given.get(yes, -math.inf)))


def pieces(text: str, num: int) -> list[str]:
    """The text in `num` pieces of whole words, tokenised as in the whole."""
    words = re.findall(r"\s*\S+", text)
    ends = [len(words) * k // num for k in range(num + 1)]
    return ["".join(words[a:b]) for a, b in zip(ends, ends[1:], strict=False)]


def server_passes(backend: sgl.RuntimeEndpoint) -> int:
    passes: int = backend.get_server_info()["internal_states"][0]["parse"][
        "target_passes"
    ]
    return passes


def ask(
    backend: sgl.RuntimeEndpoint, route: str, question: str, parts: list[str]
) -> list[float]:
    """Scores of all prefixes by one route."""
    if route == "forks":
        state = judge_by_forks.run(question, parts, SUFFIX, backend=backend)
        scores: list[float] = state["scores"]
        return scores
    state = judge.run(question, parts, backend=backend)
    scores = state.get_meta_info("check")["parse"][0]["scores"]
    return scores


def measure(backend: sgl.RuntimeEndpoint, num: int) -> dict[str, Any]:
    """All routes on TRIALS answers cut into `num` pieces."""
    seconds: dict[str, list[float]] = {route: [] for route in ROUTES}
    difference, passes = 0.0, set()
    # The first one warms up all routes and is not counted.
    for k, problem in enumerate(make_problems(TRIALS + 1, seed=19)):
        parts = pieces(render_answer(problem, "A"), num)
        scores = {}
        for route in ROUTES[k % 2 :] + ROUTES[: k % 2]:
            backend.flush_cache()
            before = server_passes(backend)
            start = time.perf_counter()
            scores[route] = ask(backend, route, problem.prompt, parts)
            taken = time.perf_counter() - start
            if k:
                seconds[route].append(taken)
            if route == "one_pass":
                passes.add(server_passes(backend) - before)
        pairs = zip(scores["one_pass"], scores["forks"], strict=True)
        difference = max(difference, *(abs(a - b) for a, b in pairs))
    found = {route: quantiles(seconds[route], n=4) for route in ROUTES}
    return {
        "prefixes": num,
        **{f"{route}_s": found[route] for route in ROUTES},
        "forks_to_one_pass": found["forks"][1] / found["one_pass"][1],
        "target_passes": sorted(passes),
        "largest_score_difference": difference,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path)
    parser.add_argument("--prefixes", type=int, nargs="+", default=[1, 4, 8, 16])
    args = parser.parse_args()
    log = Path(tempfile.mkdtemp(prefix="bench-verify-")) / "parse.log"
    rows = []
    with ServerProcess(SERVER, "parse", log) as server:
        backend = sgl.RuntimeEndpoint(server.url, chat_template_name="chatml")
        for num in args.prefixes:
            rows.append(measure(backend, num))
            print(json.dumps(rows[-1]), flush=True)
    if args.out:
        raw = {
            "provenance": provenance(),
            "trials": TRIALS,
            "rows": rows,
        }
        args.out.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
