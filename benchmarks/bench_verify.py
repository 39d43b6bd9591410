"""Does judging K prefixes in one pass beat one ordinary request per prefix?

    python benchmarks/bench_verify.py --out benchmarks/results/verify.json

Boots the embedded pair's PARSE server and judges the same answers twice in turn:
`parse_verify` and the same with `portable=True`, whose requests share their prefixes in
the radix cache. Both start from an empty cache. Reports wall times (median, quartiles),
passes counted by the server, and the largest difference between two scores.
"""

from __future__ import annotations

import argparse
import json
import platform
import re
import sys
import tempfile
import time
from pathlib import Path
from statistics import quantiles
from typing import Any

import sglang as sgl

from sglang_parse import parse_verify
from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from sglang_parse.embedded.task import make_problems, render_answer
from sglang_parse.launch import ServerProcess

SERVER = (
    *("--model-path", str(TARGET_PATH), "--speculative-algorithm", "PARSE"),
    *("--speculative-draft-model-path", str(DRAFT_PATH)),
)
TRIALS = 12


@sgl.function
def judge(s, question, parts, portable):
    s += sgl.user(question)
    s += sgl.assistant(parse_verify("check", parts, portable=portable))


def pieces(text: str, num: int) -> list[str]:
    """The text in `num` pieces of whole words."""
    words = re.findall(r"\S+\s*", text)
    ends = [len(words) * k // num for k in range(num + 1)]
    return ["".join(words[a:b]) for a, b in zip(ends, ends[1:], strict=False)]


def server_passes(backend: sgl.RuntimeEndpoint) -> int:
    passes: int = backend.get_server_info()["internal_states"][0]["parse"][
        "target_passes"
    ]
    return passes


def measure(backend: sgl.RuntimeEndpoint, num: int) -> dict[str, Any]:
    """Both routes on TRIALS answers cut into `num` pieces."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    difference, passes = 0.0, []
    # The first one warms up both routes and is not counted.
    for k, problem in enumerate(make_problems(TRIALS + 1, seed=19)):
        parts = pieces(render_answer(problem, "A"), num)
        scores = {}
        for portable in (False, True) if k % 2 else (True, False):
            backend.flush_cache()
            before = server_passes(backend)
            start = time.perf_counter()
            state = judge.run(problem.prompt, parts, portable, backend=backend)
            scores[portable] = state.get_meta_info("check")["parse"][0]["scores"]
            taken = time.perf_counter() - start
            if k:
                seconds[portable].append(taken)
            if not portable:
                passes.append(server_passes(backend) - before)
        pairs = zip(scores[False], scores[True], strict=True)
        difference = max(difference, *(abs(a - b) for a, b in pairs))
    one, many = (quantiles(seconds[route], n=4) for route in (False, True))
    return {
        "prefixes": num,
        "one_pass_s": one,
        "portable_s": many,
        "ratio_of_medians": many[1] / one[1],
        "target_passes": sorted(set(passes)),
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
            "argv": sys.argv,
            "machine": platform.processor() or platform.machine(),
            "sglang": sgl.__version__,
            "trials": TRIALS,
            "rows": rows,
        }
        args.out.write_text(json.dumps(raw, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
