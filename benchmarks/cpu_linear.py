"""Rows times the weights of a 135M model on CPU: torch's product, and the packed one.

    python -m benchmarks.cpu_linear --out FILE

The weights are random, of the shapes of SmolLM2-135M's 30 layers and of its LM head. A
line of JSON is printed and written for each number of rows: the median time of a turn
over all weights, in milliseconds, with as many threads as OMP_NUM_THREADS says.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import linear

from benchmarks.provenance import provenance
from sglang_parse.cpu.linear import multiply, packed_weight

HIDDEN, INNER, VOCAB, LAYERS = 576, 1536, 49152, 30
SHAPES = ((960, HIDDEN), (HIDDEN, HIDDEN), (2 * INNER, HIDDEN), (HIDDEN, INNER))
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TURNS = 9


def timed(
    weights: list[Tensor], product: Callable[[Tensor, Tensor], Tensor], rows: int
) -> float:
    """Median milliseconds of `rows` rows times every weight."""
    inputs = {w.shape[1]: torch.randn(rows, w.shape[1]) for w in weights}
    found = []
    for _ in range(TURNS + 1):
        start = time.perf_counter()
        for weight in weights:
            product(inputs[weight.shape[1]], weight)
        found.append(1e3 * (time.perf_counter() - start))
    return round(statistics.median(found[1:]), 2)


def packed_product(x: Tensor, weight: Tensor) -> Tensor:
    packed = packed_weight(weight, x)
    assert packed is not None
    return multiply(x, packed)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    args = parser.parse_args()
    parts = {
        "layers": [torch.randn(s) for _ in range(LAYERS) for s in SHAPES],
        "lm_head": [torch.randn(VOCAB, HIDDEN)],
    }
    with torch.inference_mode(), args.out.open("w") as out:
        for part, weights in parts.items():
            for rows in ROWS:
                row = {
                    "part": part,
                    "rows": rows,
                    "torch_ms": timed(weights, linear, rows),
                    "packed_ms": timed(weights, packed_product, rows),
                    "threads": torch.get_num_threads(),
                }
                out.write(json.dumps(row | provenance()) + "\n")
                print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
