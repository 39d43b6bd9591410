"""Torch stand-ins for the Triton kernels around gated delta nets."""

import pytest
import torch

from sglang_parse.recurrent import gated_ops

TOKENS, KEY_HEADS, VALUE_HEADS, KEY, VALUE = 3, 2, 4, 5, 6
SHARED = VALUE_HEADS // KEY_HEADS


def projections():
    """Numbers that say what they are: (token, kind, head, place)."""
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(TOKENS, KEY_HEADS, KEY, generator=generator) for _ in range(2))
    v, z = (
        torch.randn(TOKENS, VALUE_HEADS, VALUE, generator=generator) for _ in range(2)
    )
    b, a = (torch.randn(TOKENS, VALUE_HEADS, generator=generator) for _ in range(2))
    return q, k, v, z, b, a


def by_group(q, k, v, z, b, a):
    """Key head after key head, as Qwen3-Next's weights lie."""
    qkvz, ba = [], []
    for t in range(TOKENS):
        row, gates = [], []
        for h in range(KEY_HEADS):
            own = slice(h * SHARED, (h + 1) * SHARED)
            row += [q[t, h], k[t, h], v[t, own].flatten(), z[t, own].flatten()]
            gates += [b[t, own], a[t, own]]
        qkvz.append(torch.cat(row))
        ba.append(torch.cat(gates))
    return torch.stack(qkvz), torch.stack(ba)


def by_kind(q, k, v, z, b, a):
    """Kind after kind, as Qwen3.5's weights lie."""
    qkvz = torch.cat([t.flatten(1) for t in (q, k, v, z)], dim=1)
    return qkvz, torch.cat([b, a], dim=1)


@pytest.mark.parametrize(
    ("lay_out", "split"),
    [(by_group, gated_ops.split_by_group), (by_kind, gated_ops.split_by_kind)],
)
def test_projections_are_taken_apart(lay_out, split):
    """Red if a head gets another head's values, or the gate of a kind another's."""
    q, k, v, z, b, a = projections()
    found = split(*lay_out(q, k, v, z, b, a), KEY_HEADS, VALUE_HEADS, KEY, VALUE)
    expected = torch.cat([t.flatten(1) for t in (q, k, v)], dim=1), z, b, a
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.equal(theirs)


@pytest.mark.parametrize("activation", ["silu", "swish", "sigmoid"])
def test_norm_and_gate_equal_loops(activation):
    """Red if rows are normed behind their gate, or gated by another function."""
    generator = torch.Generator().manual_seed(1)
    x, gate = (torch.randn(4, VALUE, generator=generator) for _ in range(2))
    weight = torch.randn(VALUE, generator=generator)
    expected = torch.empty_like(x)
    for i in range(4):
        scale = (sum(float(n) ** 2 for n in x[i]) / VALUE + 1e-6) ** -0.5
        for j in range(VALUE):
            opened = torch.sigmoid(gate[i, j])
            if activation != "sigmoid":
                opened = opened * gate[i, j]
            expected[i, j] = x[i, j] * scale * weight[j] * opened
    found = gated_ops.norm_and_gate(x, gate, weight, None, activation, eps=1e-6)
    torch.testing.assert_close(found, expected)
    other = gated_ops.norm_or_gate(
        x=x, z=gate, weight=weight, bias=None, is_rms_norm=True, activation=activation
    )
    torch.testing.assert_close(other, expected)


def test_gates_of_attention_and_of_shared_experts():
    """Red if a gate is of another token or head."""
    generator = torch.Generator().manual_seed(2)
    out, gate = (torch.randn(TOKENS, 8, generator=generator) for _ in range(2))
    expected = out * torch.sigmoid(gate)
    strided = gate.view(TOKENS, 2, 4)
    found = gated_ops.multiply_by_sigmoid(out.clone(), strided, inplace=True)
    torch.testing.assert_close(found, expected)
    hidden = torch.randn(TOKENS, 5, generator=generator)
    weight = torch.randn(5, generator=generator)
    total = gate.clone()
    gated_ops.add_gated(hidden, weight, out, total)
    for t in range(TOKENS):
        share = torch.sigmoid((hidden[t] * weight).sum())
        torch.testing.assert_close(total[t], gate[t] + share * out[t])
