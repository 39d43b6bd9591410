"""The real target as benchmarks/train_pair/head.py wants it."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.train_pair.head import Eagle3Head
from benchmarks.train_pair.model import ModelConfig
from benchmarks.train_real.decode import GROUPED

logger = logging.getLogger("train_real")
TIMED_S = 0.2
MIXED = 0.3  # of the random weights, beside the last feature as it is


@dataclass(frozen=True)
class RealTarget:
    """What of the target the head needs. Its rows are the draft vocabulary's."""

    cfg: ModelConfig
    #: Of the target's config.json: context and vocabulary.
    config: Any
    #: [vocab, D], of all tokens.
    embed: Tensor
    #: [draft vocab, D].
    head: Tensor
    #: [D], of the last norm.
    norm: Tensor
    #: [draft vocab] int64, rising: the token of each row of `head`.
    tokens: Tensor

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., D] normed -> [..., draft vocab] float32."""
        return F.linear(hidden, self.head.to(hidden.dtype)).float()


class RealHead(Eagle3Head):
    """A head whose rows are the draft vocabulary's and whose guesses are tokens."""

    def __init__(self, target: RealTarget) -> None:
        super().__init__(target)  # type: ignore[arg-type]
        self.tokens = target.tokens
        #: [3 * D], sizes that the features are divided by.
        self.register_buffer("sizes", torch.ones(self.fc.shape[1]))

    @torch.no_grad()
    def scale_fc(self, features: Tensor) -> None:
        """Take the size of each feature layer from [..., 3 * D] of answers.

        An exported fc holds them. In training they stand beside it, for Adam moves all
        weights by about the same.
        """
        rms = features.float().unflatten(-1, (3, -1)).pow(2).mean(-1)
        rms = rms.flatten(0, -2).mean(0).sqrt()
        D = self.cfg.hidden
        self.sizes.copy_(rms.repeat_interleave(D))
        # The last feature is nearest to what the output matrix reads.
        self.fc.mul_(MIXED)[:, 2 * D :].add_(torch.eye(D))

    def unroll(
        self, ids: Tensor, features: Tensor, depth: int, start: int = 0
    ) -> Iterator[Tensor]:
        """As in Eagle3Head, on features of about one size."""
        features = features / self.sizes.to(features.dtype)
        return super().unroll(ids, features, depth, start)

    def exported_fc(self) -> Tensor:
        """[D, 3 * D], for features as the target gives them."""
        return self.fc.detach() / self.sizes

    def guess(self, hidden: Tensor) -> Tensor:
        """A token that the draft vocabulary lacks is never guessed."""
        return self.tokens[super().guess(hidden)]


def fastest_dtype() -> torch.dtype:
    """float32 or bfloat16, whichever this CPU multiplies faster now.

    A CPU with bfloat16 instructions takes half the time of float32 with them; one
    without takes five times as long.
    """
    rates = {dtype: products(dtype) for dtype in (torch.float32, torch.bfloat16)}
    logger.info("billion operations a second: %s", rates)
    return max(rates, key=lambda dtype: rates[dtype])


def products(dtype: torch.dtype) -> float:
    """Billion operations a second of this process's CPU time."""
    a, b = torch.randn(512, 576, dtype=dtype), torch.randn(1536, 576, dtype=dtype)
    F.linear(a, b)
    start, count = time.process_time(), 0
    while time.process_time() - start < TIMED_S:
        F.linear(a, b)
        count += 1
    busy = time.process_time() - start
    return round(2e-9 * count * a.numel() * len(b) / busy, 1)


def load_target(path: Path, dtype: torch.dtype) -> tuple[Any, Any]:
    """Model without gradients, and tokenizer of a folder."""
    model = LlamaForCausalLM.from_pretrained(
        path, dtype=dtype, attn_implementation=GROUPED
    )
    model = model.eval().requires_grad_(False)
    return model, AutoTokenizer.from_pretrained(path)


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
    return RealTarget(cfg, raw, weight, weight[tokens], norm, tokens)


def frequent_tokens(texts: list[list[int]], count: int, vocab: int) -> Tensor:
    """The `count` tokens that `texts` use most, rising; low ids fill what is left."""
    seen = torch.bincount(
        torch.tensor([i for text in texts for i in text]), minlength=vocab
    )
    order = torch.argsort(seen, descending=True, stable=True)
    return order[: min(count, vocab)].sort().values
