"""The real target as benchmarks/train_pair/head.py wants it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.train_pair.model import ModelConfig


@dataclass(frozen=True)
class RealTarget:
    """Its head has rows for the draft vocabulary alone, and tokens count there."""

    model: Any
    cfg: ModelConfig
    #: [vocab, D], of all tokens.
    embed: Tensor
    #: [draft vocab, D].
    head: Tensor
    #: [D], of the last norm.
    norm: Tensor
    #: [draft vocab] int64, rising: the token of each row of `head`.
    tokens: Tensor

    def __call__(
        self,
        ids: Tensor,
        positions: Tensor,
        mask: Tensor,
        dtype: torch.dtype,
        layers: tuple[int, ...],
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """ids [B, T] -> the normed hidden [B, T, D] and the inputs of `layers`.

        positions, mask: the plain causal ones, which the model makes itself.
        """
        out = self.model.model(ids, output_hidden_states=True, use_cache=False)
        tapped = {layer: out.hidden_states[layer].to(dtype) for layer in layers}
        return out.last_hidden_state.to(dtype), tapped

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] normed -> [..., draft vocab] float32."""
        return F.linear(hidden, self.head.to(hidden.dtype)).float()


def load_target(path: Path) -> tuple[Any, Any]:
    """Model in float32, without gradients, and tokenizer of a folder.

    Most CPUs multiply float32 several times faster than bfloat16.
    """
    model = LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    return model.requires_grad_(False), AutoTokenizer.from_pretrained(path)


def with_draft_vocab(model: Any, tokens: Tensor) -> RealTarget:
    """tokens: [draft vocab] int64, rising."""
    weight = model.lm_head.weight.float()
    raw = model.config
    cfg = ModelConfig(
        len(tokens),
        raw.num_hidden_layers,
        raw.hidden_size,
        raw.num_attention_heads,
        raw.intermediate_size,
    )
    norm = model.model.norm.weight.float()
    return RealTarget(model, cfg, weight, weight[tokens], norm, tokens)


def frequent_tokens(texts: list[list[int]], count: int, vocab: int) -> Tensor:
    """The `count` tokens that `texts` use most, rising; low ids fill what is left."""
    seen = torch.bincount(
        torch.tensor([i for text in texts for i in text]), minlength=vocab
    )
    order = torch.argsort(seen, descending=True, stable=True)
    return order[: min(count, vocab)].sort().values
