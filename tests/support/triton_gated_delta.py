"""SGLang's Triton kernels of gated delta nets, interpreted on CPU, against our oracle.

Run by test_gated_delta.py in a process of its own with TRITON_INTERPRET=1, which Triton
reads when it is imported. Prints one line of JSON: the largest deviations of outputs,
of states behind the sequences and of those at every chunk, as shares of their sizes.
"""

import json
import sys
from contextlib import nullcontext

import torch
import triton.language as tl
from sglang.kernels.ops.attention.fla import (
    chunk_delta_h,
    chunk_fwd,
    chunk_o,
    op,
    utils,
    wy_fast,
)
from sglang.kernels.ops.attention.fla.chunk import CHUNK_SIZE, chunk_gated_delta_rule
from sglang.kernels.ops.attention.linear.fused_gdn_gating import fused_gdn_gating
from sglang.kernels.ops.mamba.causal_conv1d_triton import causal_conv1d_fn
from torch import Tensor

from tests.support.gated_delta import KERNEL, random_layer, run_token_by_token

KEY = VALUE = 32
LENS, SLOTS, NUM_SLOTS = (70, 1, 64, 3), (4, 0, 2, 1), 6
# The kernels take no float32; queries, keys and values are in half precision.
DTYPE = torch.float16


def run(layer, qkv: Tensor, a: Tensor, b: Tensor, conv: Tensor, delta: Tensor, **more):
    """Outputs and the states at chunks; conv and delta, [slots, ...], are changed."""
    starts = torch.tensor([0, *LENS]).cumsum(0).int()
    slots = torch.tensor(SLOTS, dtype=torch.int32)
    mixed = causal_conv1d_fn(
        qkv.T,
        layer.conv_weights.to(DTYPE),
        None,
        conv_states=conv,
        query_start_loc=starts,
        seq_lens_cpu=list(LENS),
        cache_indices=slots,
        has_initial_state=torch.ones(len(LENS), dtype=torch.bool),
    ).T
    g, beta = fused_gdn_gating(layer.A_log, a, b, layer.dt_bias)
    q, k, v = mixed.split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
    out, _, chunks = chunk_gated_delta_rule(
        q=q.reshape(1, len(q), layer.num_k_heads, KEY),
        k=k.reshape(1, len(k), layer.num_k_heads, KEY),
        v=v.reshape(1, len(v), layer.num_v_heads, VALUE),
        g=g,
        beta=beta,
        initial_state=delta,
        initial_state_indices=slots,
        cu_seqlens=starts.long(),
        use_qk_l2norm_in_kernel=True,
        **more,
    )
    return out[0], chunks[0]


def prepare() -> None:
    """Have the kernels ask no GPU for its index, nor which of their settings is the
    fastest; have them look `exp` up where the interpreter replaces it."""
    utils.custom_device_ctx = lambda index: nullcontext()
    for kernel in vars(chunk_fwd).values():
        while hasattr(kernel, "fn"):
            if hasattr(kernel, "configs"):
                kernel.configs = kernel.configs[:1]
            kernel = kernel.fn
    for module in (chunk_delta_h, chunk_o, op, wy_fast):
        if hasattr(module, "exp"):
            module.exp = lambda x: tl.exp(x)


def deviation(found: Tensor, expected: Tensor) -> float:
    return float((found.float() - expected).abs().max() / expected.abs().max())


def main() -> None:
    prepare()
    layer = random_layer(key=KEY, value=VALUE)
    width = layer.conv_weights.shape[0]
    generator = torch.Generator().manual_seed(1)

    def random(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    qkv, a, b = (random(sum(LENS), n) for n in (width, *(2 * [layer.num_v_heads])))
    qkv = qkv.to(DTYPE)
    conv = random(NUM_SLOTS, width, KERNEL - 1).to(DTYPE)
    delta = random(NUM_SLOTS, layer.num_v_heads, VALUE, KEY)
    before = conv.clone(), delta.clone()
    run(layer, qkv, a, b, conv.clone(), delta, inplace_update=False)
    assert delta.equal(before[1]), "states were written though nobody asked for it"
    out, chunks = run(layer, qkv, a, b, conv, delta, inplace_update=True)
    layer.conv_weights = layer.conv_weights.to(DTYPE).float()
    deviations, first, at = [], 0, 0
    for length, slot in zip(LENS, SLOTS, strict=True):
        rows = slice(first, first + length)
        expected, states = run_token_by_token(
            layer,
            qkv[rows].float(),
            a[rows],
            b[rows],
            *(t[slot].float() for t in before),
        )
        assert conv[slot].float().equal(states[-1][0])
        deviations.append(deviation(out[rows], expected))
        deviations.append(deviation(delta[slot], states[-1][1]))
        for n in range(0, length, CHUNK_SIZE):
            deviations.append(deviation(chunks[at], states[n][1]))
            at += 1
        first += length
    rest = sorted(set(range(NUM_SLOTS)) - set(SLOTS))
    assert delta[rest].equal(before[1][rest]) and conv[rest].equal(before[0][rest])
    assert at == len(chunks)
    sys.stdout.write(json.dumps(deviations) + "\n")


if __name__ == "__main__":
    main()
