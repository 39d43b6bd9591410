"""Batched decoding with a KV cache for the stacked model, on left-padded contexts."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.train_pair.model import HEAD_DIM, THETA, TinyLlama, rms_norm, rotate


class CachedModel:
    """float32 forward passes over a growing KV cache."""

    def __init__(self, model: TinyLlama, rows: int, length: int) -> None:
        self.model = model
        heads = model.cfg.heads
        shape = (model.cfg.layers, rows, heads, length, HEAD_DIM)
        self.k, self.v = torch.zeros(shape), torch.zeros(shape)
        self.used = 0

    @torch.no_grad()
    def forward(self, ids: Tensor, positions: Tensor, valid: Tensor) -> Tensor:
        """ids, positions [B, n]; valid [B, used + n] -> last row's logits [B, V]."""
        m, (B, n) = self.model, ids.shape
        start, end = self.used, self.used + n
        angle = positions[..., None, None].float() * THETA ** (
            -torch.arange(0, HEAD_DIM, 2) / HEAD_DIM
        )
        cos, sin = angle.cos(), angle.sin()
        mask = torch.ones(n, end, dtype=torch.bool).tril(start)[None] & valid[:, None]
        mask = mask | torch.eye(n, end, dtype=torch.bool).roll(start, 1)  # padding rows
        x = F.embedding(ids, m.embed)
        for layer in range(m.cfg.layers):
            h = rms_norm(x, m.norm1[layer])
            q, k, v = F.linear(h, m.wqkv[layer]).view(B, n, -1, HEAD_DIM).chunk(3, 2)
            self.k[layer, :, :, start:end] = rotate(k, cos, sin).transpose(1, 2)
            self.v[layer, :, :, start:end] = v.transpose(1, 2)
            attn = F.scaled_dot_product_attention(
                rotate(q, cos, sin).transpose(1, 2),
                self.k[layer, :, :, :end], self.v[layer, :, :, :end], mask[:, None],
            )  # fmt: skip
            x = x + F.linear(attn.transpose(1, 2).reshape(B, n, -1), m.wo[layer])
            gate, up = F.linear(rms_norm(x, m.norm2[layer]), m.wgu[layer]).chunk(2, -1)
            x = x + F.linear(F.silu(gate) * up, m.wd[layer])
        self.used = end
        return m.logits(rms_norm(x[:, -1], m.norm))


@torch.no_grad()
def generate(
    model: TinyLlama, contexts: list[list[int]], eos: int, max_new: int = 128,
    temperature: float = 0.0, seed: int = 0,
) -> list[list[int]]:  # fmt: skip
    """Continuations, each without its end token."""
    rng = torch.Generator().manual_seed(seed)
    length = max(map(len, contexts))
    pad = torch.tensor([length - len(c) for c in contexts])
    ids = torch.tensor([[0] * (length - len(c)) + c for c in contexts])
    valid = torch.arange(length) >= pad[:, None]
    positions = (torch.arange(length) - pad[:, None]).clamp(min=0)
    cached = CachedModel(model, len(contexts), length + max_new)
    out, done = [], torch.zeros(len(contexts), dtype=torch.bool)
    for step in range(max_new):
        logits = cached.forward(ids, positions, valid)
        if temperature:
            probs = (logits / temperature).softmax(-1)
            token = torch.multinomial(probs, 1, generator=rng)[:, 0]
        else:
            token = logits.argmax(-1)
        done |= token == eos
        out.append(token.masked_fill(done, eos))
        if done.all():
            break
        ids, positions = token[:, None], (length + step - pad)[:, None]
        valid = F.pad(valid, (0, 1), value=True)
    rows = torch.stack(out, 1).tolist()
    return [row[: row.index(eos)] if eos in row else row for row in rows]
