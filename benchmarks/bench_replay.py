"""What bringing a recurrent state to the kept tokens costs on one CPU core.

    python -m benchmarks.bench_replay --out benchmarks/results/replay.json

One linear layer of the shape of Qwen3.6-35B-A3B with random weights goes on from one
request's state (decision 12). Times are CPU time of one thread, the least of some
repeats, as other programs on a machine prolong wall-clock time.
"""

import argparse
import json
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from benchmarks.provenance import provenance
from sglang_parse.recurrent.gated_delta import LinearInputs, LinearState, run_layer

KEY_HEADS, VALUE_HEADS, WIDTH, KERNEL = 16, 32, 128, 4
CONV_WIDTH = (2 * KEY_HEADS + VALUE_HEADS) * WIDTH
TOKENS = (1, 8, 32, 64, 256)


def make_layer() -> SimpleNamespace:
    """What SGLang's RadixLinearAttention holds."""
    return SimpleNamespace(
        conv_weights=torch.randn(CONV_WIDTH, KERNEL),
        bias=None,
        A_log=torch.randn(VALUE_HEADS),
        dt_bias=torch.randn(VALUE_HEADS),
        q_dim=KEY_HEADS * WIDTH,
        k_dim=KEY_HEADS * WIDTH,
        v_dim=VALUE_HEADS * WIDTH,
        num_k_heads=KEY_HEADS,
        num_v_heads=VALUE_HEADS,
        head_k_dim=WIDTH,
    )


def replay_ms(layer: SimpleNamespace, num: int, repeats: int) -> float:
    """Milliseconds of CPU time for `num` kept tokens."""
    inputs = LinearInputs(
        torch.randn(num, CONV_WIDTH),
        torch.randn(num, VALUE_HEADS),
        torch.randn(num, VALUE_HEADS),
        (num,),
    )
    start = LinearState(
        torch.randn(1, CONV_WIDTH, KERNEL - 1),
        torch.randn(1, VALUE_HEADS, WIDTH, WIDTH),
    )
    times = []
    for _ in range(repeats + 1):
        begun = time.process_time()
        run_layer(layer, inputs, start, [(0, num)])
        times.append(time.process_time() - begun)
    return 1e3 * min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeats", type=int, default=9)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    layer = make_layer()
    found = {str(n): replay_ms(layer, n, arguments.repeats) for n in TOKENS}
    told = {"layer_ms_by_kept_tokens": found, **provenance()}
    arguments.out.write_text(json.dumps(told, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
