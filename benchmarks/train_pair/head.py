"""An EAGLE-3 head for a model: one layer on some of the model's hidden states.

Row i sees the embedding of token i + 1 and the target's features of position i, and
predicts token i + 2. Each further draft step feeds the head its own last hidden.
"""

from dataclasses import replace
from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.train_pair.model import (
    HEAD_DIM,
    THETA,
    TinyLlama,
    rms_norm,
    rotate,
)

MASKED = -1e4


def feature_layers(layers: int) -> tuple[int, ...]:
    """Layers whose inputs are the features: SGLang's default, all of few layers."""
    return (2, layers // 2, layers - 3) if layers > 5 else tuple(range(layers))


@torch.no_grad()
def target_states(target: TinyLlama, ids: Tensor, dtype=torch.float32):
    """ids [B, T] -> features [B, T, layers * D], final normed hidden [B, T, D]."""
    layers = feature_layers(target.cfg.layers)
    positions = torch.arange(ids.shape[1]).expand(ids.shape)
    mask = causal(ids.shape[1], ids.shape[1], 0, dtype)
    hidden, tapped = target(ids, positions, mask, dtype, layers)
    return torch.cat([tapped[layer] for layer in layers], -1), hidden


@cache
def causal(rows: int, keys: int, hidden: int, dtype=torch.float32) -> Tensor:
    """Additive; the last `rows` of `keys` positions, each less its last `hidden`."""
    allowed = torch.ones(rows, keys, dtype=torch.bool).tril(keys - rows - hidden)
    return torch.zeros(rows, keys, dtype=dtype).masked_fill_(~allowed, MASKED)


def shift(x: Tensor) -> Tensor:
    """Row i takes what row i - 1 had (dim -2), row 0 zeros."""
    return F.pad(x[..., :-1, :], (0, 0, 1, 0))


class Eagle3Head(nn.Module):
    """Weights named and stacked as in TinyLlama; the embedding stays the target's."""

    def __init__(self, target: TinyLlama) -> None:
        super().__init__()
        self.cfg = cfg = replace(target.cfg, layers=1)
        D, A, H = cfg.hidden, cfg.heads * HEAD_DIM, cfg.ffn
        normal = lambda *shape, std: nn.Parameter(torch.randn(*shape) * std)  # noqa: E731
        self.embed = nn.Parameter(target.embed.detach().clone(), requires_grad=False)
        self.head = nn.Parameter(target.head.detach().clone())
        self.norm = nn.Parameter(target.norm.detach().clone())
        width = len(feature_layers(target.cfg.layers)) * D
        self.fc = normal(D, width, std=width**-0.5)
        self.norm1 = nn.Parameter(torch.ones(1, D))
        self.hidden_norm = nn.Parameter(torch.ones(D))
        self.norm2 = nn.Parameter(torch.ones(1, D))
        self.wqkv = normal(1, 3 * A, 2 * D, std=(2 * D) ** -0.5)
        self.wo = normal(1, D, A, std=0.5 * A**-0.5)
        self.wgu = normal(1, 2 * H, D, std=D**-0.5)
        self.wd = normal(1, D, H, std=0.5 * H**-0.5)

    @torch.no_grad()
    def scale_fc(self, features: Tensor) -> None:
        """Fold the size of each feature layer into the untrained fc."""
        layers = features.float().unflatten(-1, (-1, self.cfg.hidden))
        rms = layers.pow(2).mean((0, 1, 3)).sqrt()
        self.fc.div_(rms.repeat_interleave(self.cfg.hidden))

    def unroll(self, ids: Tensor, features: Tensor, depth: int, start=0):
        """Yield, for each draft step, the hidden of rows start.. before the last norm.

        In step k row i has drafted k tokens since row i - k, whose features were the
        target's: it sees the rows up to i - k of step 0, and i - k + j of each step j.
        """
        dtype, T = features.dtype, ids.shape[1]
        fc, wqkv, wo, wgu, wd, norm1, norm2, hidden_norm = (
            p.to(dtype)
            for p in (
                self.fc, self.wqkv[0], self.wo[0], self.wgu[0], self.wd[0],
                self.norm1[0], self.norm2[0], self.hidden_norm,
            )
        )  # fmt: skip
        angle = torch.arange(T)[:, None, None] * THETA ** (
            -torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
        )
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        embeds = F.embedding(ids.roll(-1, 1), self.embed).to(dtype)
        embeds = rms_norm(embeds, norm1)

        def qkv(x: Tensor, first: int) -> list[Tensor]:
            """[B, rows from `first`, D] -> q, k, v [B, heads, rows, 64]."""
            both = torch.cat((embeds[:, first:], rms_norm(x, hidden_norm)), -1)
            q, k, v = F.linear(both, wqkv).unflatten(-1, (-1, HEAD_DIM)).chunk(3, 2)
            q, k = (rotate(t, cos[first:], sin[first:]) for t in (q, k))
            return [t.transpose(1, 2) for t in (q, k, v)]

        x = F.linear(features, fc)
        q, keys, values = qkv(x, 0)
        x, q = x[:, start:], q[:, :, start:]
        drafted: list[tuple[Tensor, Tensor]] = []  # k, v that row i sees of each step
        for step in range(depth):
            if step:
                x = shift(x)
                q, k, v = qkv(x, start)
                drafted = [(shift(a), shift(b)) for a, b in drafted] + [(k, v)]
            scores = q @ keys.mT * HEAD_DIM**-0.5 + causal(T - start, T, step, dtype)
            own = [(q * k).sum(-1, keepdim=True) * HEAD_DIM**-0.5 for k, _ in drafted]
            probs = torch.cat((scores, *own), -1).float().softmax(-1).to(dtype)
            attn = probs[..., :T] @ values
            for j, (_, v) in enumerate(drafted):
                attn = attn + probs[..., T + j, None] * v
            x = x + F.linear(attn.transpose(1, 2).flatten(2), wo)
            gate, up = F.linear(rms_norm(x, norm2), wgu).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, wd)
            yield x

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] before the last norm -> [..., vocab] float32."""
        normed = rms_norm(hidden, self.norm.to(hidden.dtype))
        return F.linear(normed, self.head.to(hidden.dtype)).float()

    def guess(self, hidden: Tensor) -> Tensor:
        """[..., D] before the last norm -> [...] int64, the likeliest token."""
        return self.logits(hidden).argmax(-1)
