"""Learns the probe that comes with the embedded pair.

    python -m benchmarks.train_probe

Boots the pair's PARSE server with pairs kept, asks it problems of the training split at
temperatures 0 and 1, and learns from the verdicts of the target's own question. Every
figure in the file is of requests that were held out.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

from sglang_parse.bench.probe_training import TrainOptions, run_training
from sglang_parse.bench.servers import ServerProcess
from sglang_parse.cli.demo import SERVER_ARGS
from sglang_parse.embedded import CONFIG_PATH, DRAFT_PATH, PROBE_PATH, TARGET_PATH
from sglang_parse.embedded.task import make_problems

SEED = 29
SERVER = (
    *("--model-path", str(TARGET_PATH), *SERVER_ARGS),
    *("--speculative-algorithm", "PARSE"),
    *("--speculative-draft-model-path", str(DRAFT_PATH)),
    *("--speculative-parse-config", str(CONFIG_PATH)),
    *("--speculative-parse-probe-collect", "60000"),
    # Every draft is judged, whatever that costs.
    "--no-speculative-parse-adaptive",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--out", type=Path, default=PROBE_PATH)
    parser.add_argument("--problems", type=int, default=700)
    parser.add_argument("--hidden", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="train-probe-") as folder:
        prompts = Path(folder) / "prompts.jsonl"
        problems = make_problems(args.problems, SEED, split="train")
        lines = (json.dumps({"prompt": p.prompt}) + "\n" for p in problems)
        prompts.write_text("".join(lines), encoding="utf-8")
        with ServerProcess(SERVER, "collect", Path(folder) / "server.log") as server:
            options = TrainOptions(
                url=server.url,
                out=args.out,
                dataset="prompts",
                path=str(prompts),
                problems=args.problems,
                concurrency=16,
                max_new_tokens=320,
                hidden=args.hidden,
                seed=SEED,
            )
            print(run_training(options))


if __name__ == "__main__":
    main()
