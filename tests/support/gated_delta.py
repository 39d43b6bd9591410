"""Gated delta nets token by token, in loops: the oracle of recurrent/gated_delta.py."""

from types import SimpleNamespace

import torch

KEY_HEADS, VALUE_HEADS, KEY, VALUE, KERNEL = 2, 4, 8, 6, 4
WIDTH = 2 * KEY_HEADS * KEY + VALUE_HEADS * VALUE


def random_layer(
    seed: int = 0, layer_id: int = 0, key: int = KEY, value: int = VALUE
) -> SimpleNamespace:
    """What RadixLinearAttention holds; decays from strong to weak."""
    generator = torch.Generator().manual_seed(seed)
    widths = (KEY_HEADS * key, KEY_HEADS * key, VALUE_HEADS * value)
    return SimpleNamespace(
        layer_id=layer_id,
        conv_weights=torch.randn(sum(widths), KERNEL, generator=generator),
        bias=None,
        A_log=torch.randn(VALUE_HEADS, generator=generator),
        dt_bias=torch.randn(VALUE_HEADS, generator=generator) - 2,
        q_dim=widths[0],
        k_dim=widths[1],
        v_dim=widths[2],
        num_k_heads=KEY_HEADS,
        num_v_heads=VALUE_HEADS,
        head_k_dim=key,
    )


def run_token_by_token(layer, qkv, a, b, conv, delta):
    """One sequence. conv: [width, kernel - 1], delta: [heads, value, key].

    Returns ([tokens, heads, value width], the (conv, delta) in front of each token and
    behind the last).
    """
    outputs, states = [], [(conv.clone(), delta.clone())]
    shared = layer.num_v_heads // layer.num_k_heads
    for t in range(len(qkv)):
        window = torch.cat([conv, qkv[t][:, None]], dim=1)
        mixed = torch.nn.functional.silu((window * layer.conv_weights).sum(1))
        conv = window[:, 1:]
        q, k, v = mixed.split([layer.q_dim, layer.k_dim, layer.v_dim])
        delta = delta.clone()
        out = torch.empty(layer.num_v_heads, len(v) // layer.num_v_heads)
        for h in range(layer.num_v_heads):
            key = k.view(layer.num_k_heads, -1)[h // shared]
            query = q.view(layer.num_k_heads, -1)[h // shared]
            key = key / (key.square().sum() + 1e-6).sqrt()
            query = query / (query.square().sum() + 1e-6).sqrt() / len(query) ** 0.5
            wait = torch.nn.functional.softplus(a[t, h] + layer.dt_bias[h])
            delta[h] *= torch.exp(-layer.A_log[h].exp() * wait)
            value = v.view(layer.num_v_heads, -1)[h]
            change = torch.sigmoid(b[t, h]) * (value - delta[h] @ key)
            delta[h] += torch.outer(change, key)
            out[h] = delta[h] @ query
        outputs.append(out)
        states.append((conv.clone(), delta.clone()))
    return torch.stack(outputs), states
