"""A benchmark against fake servers in a process of its own, to be killed by a test.

argv: config, seconds a request takes.
"""

import sys
from pathlib import Path

from benchmarks.harness import arm_servers, run
from benchmarks.harness.config import load_config
from tests.support.fake_sglang import CharTokenizer, FakeServer

if __name__ == "__main__":
    delay_s = float(sys.argv[2])
    run.load_tokenizer = lambda path: CharTokenizer()
    arm_servers.make_server = lambda flags, name, log, timeout_s: FakeServer(
        "parse" if "PARSE" in flags else "target", delay_s
    )
    run.run_benchmark(load_config(Path(sys.argv[1])))
