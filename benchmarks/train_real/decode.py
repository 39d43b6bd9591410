"""The target's greedy answers, and its states that decoding computes anyway."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import eager_mask

from benchmarks.train_pair.head import feature_layers

GROUPED = "grouped"
DROPPED = 1 / 8  # of a batch: its share of ended answers that is worth a copy
LIKELIEST = 8  # tokens that are compared again in float32


@dataclass(frozen=True)
class Answer:
    context: list[int]
    #: What the target wrote, with the token that ends it if it did end.
    own: list[int]
    #: [len(context) + len(own) - 1, 4 * D]: the inputs of the three feature layers and
    #: the normed last hidden state of every token that the target read.
    states: Tensor


def grouped_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    **_: Any,
) -> tuple[Tensor, None]:
    """Attention whose query heads of one key head are rows of one product.

    query: [B, heads, T, d]; key, value: [B, key heads, S, d]; the mask is additive,
    [B, 1, T, S]. Returns [B, T, heads, d]. torch's own attention takes 12 times as long
    in bfloat16 on a CPU when each request has one row.
    """
    B, heads, T, d = query.shape
    kinds, S = key.shape[1], key.shape[2]
    rows = (query * scaling).reshape(B, kinds, -1, d)
    scores = (rows @ key.mT).view(B, kinds, -1, T, S)
    if attention_mask is not None:
        scores = scores + attention_mask[:, :, None]
    probs = scores.float().softmax(-1).to(query.dtype)
    out = probs.view(B, kinds, -1, S) @ value
    return out.view(B, heads, T, d).transpose(1, 2), None


AttentionInterface.register(GROUPED, grouped_attention)
AttentionMaskInterface.register(GROUPED, eager_mask)


@torch.no_grad()
def answers(model: Any, contexts: list[list[int]], longest: int) -> list[Answer]:
    """The greedy answers to a batch of contexts, up to `longest` tokens each."""
    eos, pad = model.config.eos_token_id, model.config.pad_token_id
    width = max(map(len, contexts))
    ids = torch.tensor([[pad] * (width - len(c)) + c for c in contexts])
    mask = torch.tensor([[0] * (width - len(c)) + [1] * len(c) for c in contexts])
    cache, rows = DynamicCache(), list(range(len(contexts)))
    own: list[list[int]] = [[] for _ in contexts]
    states: list[list[Tensor]] = [[] for _ in contexts]
    ended: set[int] = set()
    while len(ended) < len(contexts):
        read, new = forward(model, ids, mask, cache)
        for row, i in enumerate(rows):
            if i in ended:
                continue
            states[i].append(read[row, -len(contexts[i]) :])
            own[i].append(new[row])
            if new[row] == eos or len(own[i]) == longest:
                ended.add(i)
        ids, mask = torch.tensor(new)[:, None], torch.cat((mask, mask[:, -1:]), 1)
        live = [row for row, i in enumerate(rows) if i not in ended]
        if live and len(live) <= (1 - DROPPED) * len(rows):
            kept = torch.tensor(live)
            cache.batch_select_indices(kept)
            ids, mask, rows = ids[kept], mask[kept], [rows[row] for row in live]
    return [
        Answer(context, text, torch.cat(some))
        for context, text, some in zip(contexts, own, states, strict=True)
    ]


def forward(
    model: Any, ids: Tensor, mask: Tensor, cache: DynamicCache
) -> tuple[Tensor, list[int]]:
    """Read `ids` [B, T] behind `cache`: states [B, T, 4 * D] and each row's next token.

    mask: [B, cached + T], 1 for tokens, 0 for padding in front of them.
    """
    positions = (mask.cumsum(1) - 1).clamp_min(0)[:, -ids.shape[1] :]
    out = model.model(
        ids,
        attention_mask=mask,
        position_ids=positions,
        past_key_values=cache,
        use_cache=True,
        output_hidden_states=True,
    )
    last, layers = out.last_hidden_state, feature_layers(len(model.model.layers))
    read = torch.cat([*(out.hidden_states[layer] for layer in layers), last], -1)
    return read.bfloat16(), likeliest(model.lm_head.weight, last[:, -1])


def likeliest(weight: Tensor, hidden: Tensor) -> list[int]:
    """The token of the largest logit; bfloat16 alone would tie many of them."""
    top = (hidden @ weight.mT).topk(LIKELIEST, -1).indices
    logits = (weight[top].float() @ hidden.float()[..., None]).squeeze(-1)
    return top.gather(1, logits.argmax(-1, keepdim=True)).squeeze(1).tolist()
