"""A small draft for the real model: some of its layers, distilled from it.

The embedding and the output matrix stay the target's and are not trained.
"""

from __future__ import annotations

import logging
import time
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.train_real.decode import Answer
from benchmarks.train_real.fit import LOG_EVERY, WIDTH, grouped, nth_order, rate

logger = logging.getLogger("train_real")
LR = 1e-3
DTYPE = torch.float16  # of the written weights, as the target's


@dataclass(frozen=True)
class SmallOptions:
    #: Folder of the draft.
    out: Path
    #: Layers that the draft keeps.
    layers: int
    #: When to stop, of time.monotonic(), though steps are left.
    end: float
    #: How often each answer is trained on.
    epochs: int
    #: Answers of one step.
    batch: int
    seed: int
    #: Of the products; the draft's own weights are trained in float32.
    dtype: torch.dtype


def kept_layers(count: int, of: int) -> list[int]:
    """`count` of `of` layers, evenly spaced, the first and the last among them."""
    if count == 1:
        return [0]
    return [round(k * (of - 1) / (count - 1)) for k in range(count)]


def pruned(model: Any, count: int) -> Any:
    """A copy of `model` with `count` layers; its embedding takes no gradient."""
    small = deepcopy(model).float()
    kept = kept_layers(count, len(small.model.layers))
    small.model.layers = nn.ModuleList(small.model.layers[k] for k in kept)
    for index, layer in enumerate(small.model.layers):
        layer.self_attn.layer_idx = index
    small.config.num_hidden_layers = count
    small.requires_grad_(True)
    small.get_input_embeddings().weight.requires_grad_(False)
    return small.train()


def rows_of(answers: list[Answer]) -> tuple[Tensor, Tensor]:
    """ids [B, T] int64, padded behind, and whether a row predicts an answer's token.

    The second is [B, T - 1] bool: row i predicts token i + 1.
    """
    texts = [a.context + a.own for a in answers]
    width = max(map(len, texts))
    ids = torch.tensor([text + [0] * (width - len(text)) for text in texts])
    row = torch.arange(width - 1)
    first = torch.tensor([len(a.context) for a in answers])[:, None]
    end = torch.tensor([len(text) for text in texts])[:, None]
    return ids, (row + 1 >= first) & (row + 1 < end)


def hidden_of(model: Any, answers: list[Answer]) -> tuple[Tensor, Tensor, Tensor]:
    """The last hidden state of each row that predicts an answer's token.

    Returns hidden [N, D], and the ids and the mask of `rows_of`.
    """
    ids, own = rows_of(answers)
    hidden = model.model(ids, use_cache=False).last_hidden_state
    return hidden[:, :-1][own], ids, own


def target_hidden(answers: list[Answer], width: int) -> Tensor:
    """What `hidden_of` gives for the target: decoding computed it. [N, width]."""
    return torch.cat([a.states[len(a.context) - 1 :, -width:] for a in answers])


def train_small(model: Any, answers: list[Answer], options: SmallOptions) -> Any:
    """The pruned model, trained on the target's distribution for some epochs."""
    torch.manual_seed(options.seed)
    small, weight = pruned(model, options.layers), model.lm_head.weight
    some = [p for p in small.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(some, lr=LR, betas=(0.9, 0.98), weight_decay=0.01)
    groups = grouped(answers, options.batch)
    steps, window = options.epochs * len(groups), list[float]()
    half = options.dtype != torch.float32
    for step in range(steps):
        if time.monotonic() >= options.end:
            break
        group = groups[nth_order(len(groups), step, options.seed)]
        hidden = target_hidden(group, weight.shape[1]).to(weight.dtype)
        wanted = F.linear(hidden, weight).float().softmax(-1)
        with torch.autocast("cpu", options.dtype, enabled=half):
            logits = F.linear(hidden_of(small, group)[0], weight)
        loss = F.cross_entropy(logits.float(), wanted)
        loss.backward()
        for settings in optimizer.param_groups:
            settings["lr"] = LR * rate(step, steps)
        torch.nn.utils.clip_grad_norm_(some, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        window.append(loss.item())
        if len(window) == LOG_EVERY:
            mean = sum(window) / LOG_EVERY
            logger.info("small draft: step %d of %d: loss %.3f", step + 1, steps, mean)
            window = []
    return small.eval()


@torch.no_grad()
def small_length(small: Any, answers: list[Answer], batch: int) -> dict[str, float]:
    """Greedy chains of WIDTH tokens, one after the other through each text.

    share_right: of the answers' tokens, given the target's text before. A round is one
    target pass and yields the accepted tokens and one of the target's.
    """
    right_of_all = own_of_all = rounds = tokens = 0
    for group in grouped(answers, batch):
        hidden, ids, own = hidden_of(small, group)
        guess = F.linear(hidden, small.lm_head.weight).argmax(-1)
        right = guess == ids[:, 1:][own]
        right_of_all, own_of_all = (
            right_of_all + int(right.sum()),
            own_of_all + len(right),
        )
        for row in right.split(own.sum(1).tolist()):
            at, marks = 0, row.tolist()
            while at < len(marks):
                run = 0
                while run < WIDTH and at + run < len(marks) and marks[at + run]:
                    run += 1
                step = min(run + 1, len(marks) - at)
                rounds, tokens, at = rounds + 1, tokens + step, at + step
    return {
        "accept_length": round(tokens / max(1, rounds), 4),
        "share_right": round(right_of_all / max(1, own_of_all), 4),
        "rounds": rounds,
        "tokens": tokens,
    }


def export_small(small: Any, tokenizer: Any, path: Path) -> None:
    """The draft as a folder that SGLang and transformers read."""
    deepcopy(small).to(DTYPE).save_pretrained(path)
    tokenizer.save_pretrained(path)
