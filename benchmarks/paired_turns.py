"""What do some flags of the server cost, to a percent, beside other work?

    python -m benchmarks.paired_turns --out FILE --minutes 12 \\
        --base="--speculative-parse-draft-compose none" \\
        --other="--speculative-parse-draft-compose eagle3 \\
            --speculative-parse-draft-eagle-model-path {hostile_head}"

Two servers of the embedded pair, with adaptive windows, are asked the same problems in
short turns, the first of which alternates. A turn is four problems for each request at
a time. `{hostile_head}` is the draft's head with shuffled output rows, which never says
what it means. After a line about the machine, each line of the file has the seconds,
processor seconds, tokens and wrong answers of a turn for each server. Printed are the
other server's tokens a second over those of the first, by the sums over all turns, with
intervals of 95% over turns.
"""

from __future__ import annotations

import argparse
import json
import shlex
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness.arms import make_hostile_draft
from benchmarks.harness.stats import speed_ratio
from benchmarks.provenance import provenance
from sglang_parse.cli.demo_run import EVAL_SEED, SERVER_ARGS, WARM_UP_SEED
from sglang_parse.demo.load import Prompt, encode_prompts, load_tokenizer, measure
from sglang_parse.demo.servers import ServerProcess, running
from sglang_parse.embedded import DRAFT_HEAD_PATH, DRAFT_PATH, TARGET_PATH
from sglang_parse.embedded.task import make_problems

PAIR = (
    *("--model-path", str(TARGET_PATH), *SERVER_ARGS, "--sleep-on-idle"),
    *("--speculative-algorithm", "PARSE"),
    *("--speculative-draft-model-path", str(DRAFT_PATH)),
)
ARMS = ("base", "other")
WARM_UP_TURNS = 12


def turn(server: ServerProcess, prompts: list[Prompt], concurrency: int) -> list[float]:
    """Seconds, processor seconds, tokens and wrong answers."""
    before = server.cpu_s()
    found = measure(server.url, prompts, concurrency=concurrency)
    cpu_s = server.cpu_s() - before
    tokens = sum(one.num_tokens for one in found.results)
    wrong = sum(not one.correct for one in found.results)
    return [found.wall_s, cpu_s, tokens, wrong]


def told(turns: list[dict[str, list[float]]]) -> str:
    """The ratio of speeds by time and by processor time, with intervals."""
    (t, cpu, tokens, _), (base_t, base_cpu, base_tokens, _) = (
        zip(*(one[arm] for one in turns), strict=True) for arm in ARMS[::-1]
    )
    found = (
        ("time", speed_ratio(tokens, t, base_tokens, base_t)),
        ("processor time", speed_ratio(tokens, cpu, base_tokens, base_cpu)),
    )
    return ", ".join(f"{w} {r:.4f} ({a:.4f} to {b:.4f})" for w, (r, a, b) in found)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--base", required=True)
    parser.add_argument("--other", required=True)
    parser.add_argument("--concurrency", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--minutes", type=float, default=10.0, help="of each")
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    tokenizer = load_tokenizer(str(TARGET_PATH))
    head = make_hostile_draft(str(DRAFT_HEAD_PATH))
    with tempfile.TemporaryDirectory() as folder:
        servers = {}
        for arm in ARMS:
            flags = shlex.split(getattr(args, arm).format(hostile_head=head))
            log = Path(folder) / f"{arm}.log"
            servers[arm] = ServerProcess([*PAIR, *flags], arm, log)
        with running(list(servers.values())), args.out.open("a") as out:
            out.write(json.dumps(provenance()) + "\n")
            for concurrency in args.concurrency:

                def run(seed: int, at: int, concurrency: int = concurrency) -> Any:
                    problems = make_problems(4 * concurrency, seed)
                    prompts = encode_prompts(tokenizer, problems)
                    order = ARMS if at % 2 else ARMS[::-1]
                    return {a: turn(servers[a], prompts, concurrency) for a in order}

                for at in range(WARM_UP_TURNS):
                    run(WARM_UP_SEED + at, at)
                turns: list[dict[str, list[float]]] = []
                end = time.monotonic() + 60 * args.minutes
                while time.monotonic() < end:
                    turns.append(run(EVAL_SEED + len(turns), len(turns)))
                    row = {"concurrency": concurrency, **turns[-1]}
                    out.write(json.dumps(row) + "\n")
                    out.flush()
                print(f"{concurrency} at a time, {len(turns)} turns: {told(turns)}")


if __name__ == "__main__":
    main()
