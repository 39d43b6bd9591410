"""Gated delta nets in plain torch: the reference of what Qwen3-Next's linear layers do.

A head keeps a state S, [value width, key width]. A token with key k, value v, query q,
decay g <= 0 and rate beta changes it and reads it:

    S = exp(g) S;   S += beta (v - S k) k^T;   out = S q / sqrt(key width)

Keys and queries have length one. A causal convolution over the last few tokens makes
q, k and v, so a sequence is continued from two states (`LinearState`). Tokens are
computed in chunks, within which the rule is a triangular system (arXiv:2412.06464).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

#: Tokens of one triangular system.
CHUNK = 64
#: Where a state is wanted: (sequence, number of its tokens in front).
Places = Sequence[tuple[int, int]]


@dataclass(frozen=True)
class LinearState:
    """What n sequences leave behind in one layer.

    conv: [n, conv width, kernel - 1] the last inputs of the convolution. delta: [n,
    heads, value width, key width] float32.
    """

    conv: Tensor
    delta: Tensor


@dataclass(frozen=True)
class LinearInputs:
    """What a layer reads of the rows of some sequences, one after another.

    qkv: [rows, conv width] before the convolution. a, b: [rows, heads] before they
    become decays and rates. lens: rows of each sequence.
    """

    qkv: Tensor
    a: Tensor
    b: Tensor
    lens: tuple[int, ...]

    @classmethod
    def of(
        cls, rows: Tensor | None, lens: Sequence[int], qkv: Tensor, a: Tensor, b: Tensor
    ) -> LinearInputs:
        """Those of the rows at `rows`, [n] int64, None for all."""
        a, b = (t.reshape(-1, t.shape[-1]) for t in (a, b))
        if rows is not None:
            qkv, a, b = (t.index_select(0, rows) for t in (qkv, a, b))
        return cls(qkv, a, b, tuple(lens))

    def leading(self, counts: Sequence[int]) -> LinearInputs:
        """The first counts[i] rows of each sequence, without those that keep none."""
        starts = accumulate(self.lens, initial=0)
        spans = [(s, n) for s, n in zip(starts, counts, strict=False) if n]
        rows = torch.cat([torch.arange(s, s + n) for s, n in spans])
        return self.of(rows, [n for _, n in spans], self.qkv, self.a, self.b)


def run_layer(
    layer: Any, inputs: LinearInputs, start: LinearState, places: Places
) -> tuple[Tensor, LinearState]:
    """Continue sequences through one layer.

    layer: RadixLinearAttention of SGLang, which holds the weights. start: of the
    sequences. Returns ([rows, heads, value width], the states at `places`).
    """
    kernel = layer.conv_weights.shape[-1]
    rows = pad_rows(inputs.qkv, inputs.lens)
    window = torch.cat([start.conv.transpose(1, 2).to(rows.dtype), rows], dim=1)
    mixed = silu(causal_conv(window, layer.conv_weights, layer.bias))
    q, k, v = mixed.float().split([layer.q_dim, layer.k_dim, layer.v_dim], dim=-1)
    shared = layer.num_v_heads // layer.num_k_heads
    q, k = (
        normalize_rows(t.unflatten(-1, (layer.num_k_heads, -1))).repeat_interleave(
            shared, dim=2
        )
        for t in (q, k)
    )
    decay = -layer.A_log.float().exp() * softplus(inputs.a.float() + layer.dt_bias)
    out, delta = gated_delta_rule(
        q=q * layer.head_k_dim**-0.5,
        k=k,
        v=v.unflatten(-1, (layer.num_v_heads, -1)),
        g=pad_rows(decay, inputs.lens),
        beta=pad_rows(inputs.b.float().sigmoid(), inputs.lens),
        state=start.delta.float(),
        places=places,
    )
    conv = [window[i, n : n + kernel - 1].T for i, n in places]
    ends = LinearState(torch.stack(conv) if conv else start.conv[:0], delta)
    return take_rows(out, inputs.lens).to(inputs.qkv.dtype), ends


def causal_conv(window: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Each channel's own convolution of the last tokens.

    window: [n, kernel - 1 + tokens, width]. weight: [width, kernel], the last entry of
    the token itself. Returns [n, tokens, width].
    """
    mixed = conv1d(
        window.transpose(1, 2), weight[:, None], bias, groups=weight.shape[0]
    )
    return mixed.transpose(1, 2)


def normalize_rows(x: Tensor) -> Tensor:
    """Rows of length one, as far as they are not tiny."""
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta_rule(
    *,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    g: Tensor,
    beta: Tensor,
    state: Tensor,
    places: Places,
) -> tuple[Tensor, Tensor]:
    """The rule over padded sequences, all float32.

    q, k: [n, tokens, heads, key width]; v: [n, tokens, heads, value width]; g, beta:
    [n, tokens, heads], 0 where a row is padding. state: [n, heads, value width, key
    width]. Returns (out like v, [len(places), heads, value width, key width]).
    """
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    g, beta = (t.transpose(1, 2) for t in (g, beta))
    out = torch.empty_like(v)
    found = state.new_empty(len(places), *state.shape[1:])
    for first in range(0, q.shape[2], CHUNK):
        span = slice(first, first + CHUNK)
        key, summed = k[:, :, span], g[:, :, span].cumsum(-1)
        fresh, out[:, :, span] = _chunk(
            q[:, :, span], key, v[:, :, span], summed, beta[:, :, span], state
        )
        here = [
            (at, i, n - first)
            for at, (i, n) in enumerate(places)
            if first < n <= first + CHUNK or (n == 0 and first == 0)
        ]
        for at, i, n in here:
            found[at] = _state_behind(
                n, key[i : i + 1], fresh[i : i + 1], summed[i : i + 1], state[i : i + 1]
            )[0]
        if span.stop < q.shape[2]:
            state = _state_behind(key.shape[2], key, fresh, summed, state)
    return out.transpose(1, 2), found


def _chunk(
    q: Tensor, k: Tensor, v: Tensor, summed: Tensor, beta: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """What each token of a chunk adds to the state, and what it reads.

    summed: [n, heads, tokens], the decays from the chunk's beginning on. Returns two of
    [n, heads, tokens, value width].
    """
    size = k.shape[2]
    seen = torch.ones(size, size, dtype=torch.bool).tril()
    between = (summed[..., :, None] - summed[..., None, :]).masked_fill(
        ~seen, -torch.inf
    )
    decay, since = between.exp(), summed.exp()[..., None]
    system = beta[..., None] * decay * (k @ k.mT)
    wanted = beta[..., None] * (v - since * (k @ state.mT))
    # The diagonal is taken for ones.
    fresh = torch.linalg.solve_triangular(
        system, wanted, upper=False, unitriangular=True
    )
    out = since * (q @ state.mT) + (decay * (q @ k.mT)) @ fresh
    return fresh, out


def _state_behind(
    num: int, k: Tensor, fresh: Tensor, summed: Tensor, state: Tensor
) -> Tensor:
    """The state behind the first `num` tokens of a chunk (`_chunk`)."""
    if num == 0:
        return state
    total = summed[..., num - 1 : num]
    left = (total - summed[..., :num]).exp()[..., None]
    kept = state * total[..., None].exp()
    return kept + (left * fresh[:, :, :num]).mT @ k[:, :, :num]


def pad_rows(rows: Tensor, lens: Sequence[int]) -> Tensor:
    """[sum(lens), ...] -> [len(lens), max(lens), ...], zeros behind each sequence."""
    if len(set(lens)) == 1:
        return rows.unflatten(0, (len(lens), lens[0]))
    return torch.nn.utils.rnn.pad_sequence(list(rows.split(list(lens))), True)


def take_rows(padded: Tensor, lens: Sequence[int]) -> Tensor:
    """The reverse of `pad_rows`."""
    if len(set(lens)) == 1:
        return padded.flatten(0, 1)
    real = torch.arange(padded.shape[1]) < torch.tensor(lens)[:, None]
    return padded[real]
