"""A Llama with stacked weights, small enough to compile one block and reuse it."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_DIM = 64
EPS = 1e-5
THETA = 10000.0


@dataclass(frozen=True)
class ModelConfig:
    vocab: int
    layers: int
    hidden: int = 128
    heads: int = 2
    ffn: int = 256


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    x32 = x.float()
    x32 = x32 * torch.rsqrt(x32.pow(2).mean(-1, keepdim=True) + EPS)
    return (x32 * weight).to(weight.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x: [B, T, heads, 64]; cos, sin: [B, T, 1, 32] (rotate-half convention)."""
    a, b = x.chunk(2, -1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), -1)


def block(x, cos, sin, mask, norm1, wqkv, wo, norm2, wgu, wd):
    """One decoder layer; x: [B, T, D]; mask: additive, broadcast to [B, 1, T, T].

    Plain bmm attention: at T < 250 it trains faster on a CPU than the flash kernel.
    """
    B, T, _ = x.shape
    qkv = F.linear(rms_norm(x, norm1), wqkv).view(B, T, -1, HEAD_DIM)
    q, k, v = qkv.chunk(3, 2)
    q, k = rotate(q, cos, sin), rotate(k, cos, sin)
    q, k, v = (t.transpose(1, 2).reshape(-1, T, HEAD_DIM) for t in (q, k, v))
    scores = torch.bmm(q, k.mT).view(B, -1, T, T) * HEAD_DIM**-0.5 + mask
    probs = scores.float().softmax(-1).to(x.dtype).view(-1, T, T)
    attn = torch.bmm(probs, v).view(B, -1, T, HEAD_DIM).transpose(1, 2)
    x = x + F.linear(attn.reshape(B, T, -1), wo)
    gate, up = F.linear(rms_norm(x, norm2), wgu).chunk(2, -1)
    return x + F.linear(F.silu(gate) * up, wd)


class TinyLlama(nn.Module):
    """Weights of all layers stacked on dim 0, so that Muon steps run as one bmm."""

    STACKED = ("norm1", "wqkv", "wo", "norm2", "wgu", "wd")

    def __init__(self, cfg: ModelConfig, block_fn=block) -> None:
        super().__init__()
        self.cfg, self.block_fn = cfg, block_fn
        L, D, A, H = cfg.layers, cfg.hidden, cfg.heads * HEAD_DIM, cfg.ffn
        normal = lambda *shape, std: nn.Parameter(torch.randn(*shape) * std)  # noqa: E731
        self.embed = normal(cfg.vocab, D, std=0.5)
        self.head = normal(cfg.vocab, D, std=0.02)
        self.norm = nn.Parameter(torch.ones(D))
        self.norm1 = nn.Parameter(torch.ones(L, D))
        self.norm2 = nn.Parameter(torch.ones(L, D))
        self.wqkv = normal(L, 3 * A, D, std=D**-0.5)
        self.wo = normal(L, D, A, std=0.5 * (A * L) ** -0.5)
        self.wgu = normal(L, 2 * H, D, std=D**-0.5)
        self.wd = normal(L, D, H, std=0.5 * (H * L) ** -0.5)

    def forward(self, ids, positions, mask, dtype=torch.bfloat16, taps=()):
        """ids, positions: [B, T] -> final normed hidden [B, T, D], {layer: hidden}."""
        freq = THETA ** (-torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
        angle = positions[..., None, None].float() * freq
        cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
        stacks = [getattr(self, name).to(dtype).unbind(0) for name in self.STACKED]
        x = F.embedding(ids, self.embed.to(dtype))
        tapped = {0: x} if 0 in taps else {}
        for layer, weights in enumerate(zip(*stacks, strict=True)):
            x = self.block_fn(x, cos, sin, mask, *weights)
            if layer + 1 in taps:
                tapped[layer + 1] = x
        return rms_norm(x, self.norm.to(dtype)), tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] -> [..., vocab] float32."""
        return F.linear(hidden, self.head.to(hidden.dtype)).float()


class Muon:
    """Muon for stacked matrices, AdamW for the rest; lr is set by the caller."""

    def __init__(
        self,
        model: nn.Module,
        extra=(),
        lr=0.02,
        adam_lr=2e-3,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        """dtype: of the orthogonalisation."""
        self.matrices = [(model.wqkv, 3), (model.wo, 1), (model.wgu, 2), (model.wd, 1)]
        self.momentum = [torch.zeros_like(p) for p, _ in self.matrices]
        rest = [model.embed, model.head, model.norm, model.norm1, model.norm2, *extra]
        self.adam = torch.optim.AdamW(
            rest, lr=adam_lr, betas=(0.9, 0.98), weight_decay=0.0, fused=True
        )
        self.lr, self.adam_lr, self.dtype = lr, adam_lr, dtype
        self.params = [*rest, *(p for p, _ in self.matrices)]

    @torch.no_grad()
    def step(self, scale: float, decay: float = 0.01) -> None:
        for group in self.adam.param_groups:
            group["lr"] = self.adam_lr * scale
        self.adam.step()
        for (p, parts), m in zip(self.matrices, self.momentum, strict=True):
            m.lerp_(p.grad, 0.05)
            g = p.grad.lerp(m, 0.95)
            g = g.view(g.shape[0] * parts, -1, g.shape[-1])
            update = (
                orthogonalize(g.to(self.dtype)) * max(1, g.shape[1] / g.shape[2]) ** 0.5
            )
            p.mul_(1 - decay * self.lr * scale)
            p.add_(update.view_as(p), alpha=-self.lr * scale)
        for p in self.params:
            p.grad = None


def orthogonalize(g: Tensor, steps: int = 5) -> Tensor:
    """Newton-Schulz orthogonalisation of each matrix of g [N, rows, cols]."""
    x = g
    if tall := x.shape[1] > x.shape[2]:
        x = x.mT
    x = x / (x.norm(dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        a = x @ x.mT
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return (x.mT if tall else x).float()
