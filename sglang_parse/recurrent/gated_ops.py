"""Torch stand-ins for the Triton kernels around gated delta nets.

Their arguments are those of SGLang's functions in sglang/kernels/ops.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import silu


def split_by_group(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Qwen3-Next's projections: each key head's q, k, v and z lie side by side.

    Returns qkv [tokens, width], z [tokens, heads, value width], b and a [tokens,
    heads]. Replaces `fused_qkvzba_split_reshape_cat`.
    """
    shared = num_heads_v // num_heads_qk
    num = len(mixed_qkvz)
    groups = mixed_qkvz.view(num, num_heads_qk, -1)
    width = shared * head_v
    q, k, v, z = groups.split([head_qk, head_qk, width, width], dim=-1)
    b, a = mixed_ba.view(num, num_heads_qk, -1).split(shared, dim=-1)
    return (
        torch.cat([t.reshape(num, -1) for t in (q, k, v)], dim=-1),
        z.reshape(num, num_heads_v, head_v),
        b.reshape(num, num_heads_v),
        a.reshape(num, num_heads_v),
    )


def split_by_kind(
    mixed_qkvz: Tensor,
    mixed_ba: Tensor,
    num_heads_qk: int,
    num_heads_v: int,
    head_qk: int,
    head_v: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Qwen3.5's projections: all q, all k, all v, all z. Returns what `split_by_group`
    does. Replaces `fused_qkvzba_split_reshape_cat_contiguous`."""
    width = num_heads_v * head_v
    qkv, z = mixed_qkvz.split([2 * num_heads_qk * head_qk + width, width], dim=-1)
    b, a = mixed_ba.split(num_heads_v, dim=-1)
    return qkv, z.reshape(-1, num_heads_v, head_v), b, a


def norm_and_gate(
    x: Tensor,
    g: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    activation: str = "swish",
    residual: Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    eps: float = 1e-6,
) -> Tensor:
    """RMS norm, then the gate. Replaces fla/fused_norm_gate.py, `rms_norm_gated`."""
    assert residual is None and not prenorm
    return _norm_and_gate(x, g, weight, bias, activation, eps)


def norm_or_gate(
    *,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    z: Tensor | None = None,
    eps: float = 1e-6,
    group_size: int | None = None,
    norm_before_gate: bool = True,
    is_rms_norm: bool = False,
    activation: str = "swish",
) -> Tensor:
    """The same. Replaces fla/layernorm_gated.py, `rms_norm_gated`."""
    assert is_rms_norm and z is not None and norm_before_gate and group_size is None
    return _norm_and_gate(x, z, weight, bias, activation, eps)


def _norm_and_gate(
    x: Tensor, gate: Tensor, weight: Tensor, bias: Any, activation: str, eps: float
) -> Tensor:
    rows, gates = x.float(), gate.reshape(x.shape).float()
    rows = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + eps)
    rows = rows * weight.float()
    if bias is not None:
        rows = rows + bias.float()
    opened = gates.sigmoid() if activation == "sigmoid" else silu(gates)
    return (rows * opened).to(x.dtype)


def multiply_by_sigmoid(
    attn_output: Tensor, gate: Tensor, inplace: bool = False, quant: bool = False
) -> Tensor:
    """The output gate of full attention. Replaces `fused_sigmoid_mul`."""
    assert not quant
    return attn_output * gate.reshape(attn_output.shape).sigmoid()


def add_gated(
    hidden_states: Tensor,
    gate_weight: Tensor,
    shared_output: Tensor,
    final_hidden_states: Tensor,
) -> None:
    """Add the shared expert's output by its gate. Replaces
    `fused_gate_sigmoid_mul_add`."""
    gate = (hidden_states.float() @ gate_weight.float()).sigmoid()[:, None]
    final_hidden_states += (gate * shared_output.float()).to(shared_output.dtype)
