"""How long does a draft step with guesses keep the host busy, beside the model?

    python -m benchmarks.gpu.guess_host

The host reads each such step before it prepares the next, so no device hides this time.
The embedded pair is built in this process and its decode steps are captured (on a CPU
by the tests' stand-in for CUDA graphs). Their replay then computes nothing, and what is
left is Python: guesses, the batch, its upload, SGLang's preparation of a captured step,
sampling and its read-back. CPU time of one thread, so that other processes do not
stretch it; median, least and greatest of the repeats.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.engine import VERDICT_TOKEN, Engine
from benchmarks.gpu.fast_paths import replay_on_cpu
from benchmarks.gpu.pairs import PAIRS, model_args

CONTEXT, NUM_NEW, NUM_GUESSES, REPEATS, WARM_UP = 100, 256, 3, 12, 2


def seconds_of(engine: Engine, num_requests: int) -> list[float]:
    """Of the thread, per step, in each repeat."""
    from sglang_parse.drafting.lanes import DraftPhase, Lane, Lanes

    rows = engine.fill_rows(num_requests, CONTEXT + NUM_NEW + 2)
    found = []
    for _ in range(WARM_UP + REPEATS):
        requests = engine.draft_requests(rows, CONTEXT, NUM_NEW)
        found.append(
            time_phase(engine, Lanes(Lane(r, 1) for r in requests), DraftPhase())
        )
    return found[WARM_UP:]


def time_phase(engine: Engine, lanes: Any, phase: Any) -> float:
    """A draft phase in which three guesses of each request are checked in a step."""
    from sglang_parse.drafting.guessed_steps import write_guessed

    num_steps = 0

    def guess(_: Any, most: list[int]) -> list[list[int]]:
        nonlocal num_steps
        num_steps += 1
        return [[VERDICT_TOKEN] * max(0, min(NUM_GUESSES, num)) for num in most]

    sampling = engine.greedy_sampling(len(lanes))
    begun = time.thread_time()
    write_guessed(engine.draft_model, lanes, engine.table, sampling, phase, guess=guess)
    return (time.thread_time() - begun) / num_steps


def main() -> None:
    replay_on_cpu()
    flags = model_args(PAIRS["embedded"], Path("build/gpu/models"))
    flags += ["--speculative-algorithm", "PARSE", "--max-running-requests", "32"]
    flags += ["--cuda-graph-max-bs-decode", "32", "--max-total-tokens", "16384"]
    engine = Engine(flags)
    graphs = engine.draft_model.runner.decode_cuda_graph_runner
    # The outputs of a capture stay as they are.
    graphs.backend.replay = lambda key, *_, **__: graphs.backend.outputs[key]
    for num_requests in (1, 8):
        ms = [1000 * s for s in seconds_of(engine, num_requests)]
        print(
            f"{num_requests} requests: {statistics.median(ms):.2f} ms a step "
            f"({min(ms):.2f} to {max(ms):.2f})"
        )


if __name__ == "__main__":
    with torch.no_grad():
        main()
