"""Training of the head until a time, with checkpoints that it goes on from."""

from __future__ import annotations

import logging
import math
import random
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.train_pair.head import Eagle3Head
from benchmarks.train_pair.model import Muon
from benchmarks.train_pair.train_head import (
    HeadBatch,
    accept_length,
    head_batches,
    head_loss,
)
from benchmarks.train_real.export import export_head
from benchmarks.train_real.target import RealTarget
from benchmarks.train_real.texts import Text

logger = logging.getLogger("train_real")
LR, ADAM_LR = 0.01, 1e-3
WARM_UP = 30  # steps
FINAL = 0.02  # of the learning rate, at the end of the time
LOG_EVERY = 10  # steps
SAVE_EVERY_S = 300.0
WIDTH = 4  # tokens of a drafted chain


@dataclass(frozen=True)
class FitOptions:
    #: Folder of the head.
    out: Path
    #: File that training goes on from.
    state: Path
    #: When to stop, of time.monotonic().
    end: float
    #: Texts of one step.
    batch: int
    seed: int


def fit(
    target: RealTarget, texts: list[Text], tokenizer: Any, options: FitOptions
) -> Eagle3Head:
    """A head trained until the time is over; it is written to `options.out`."""
    torch.manual_seed(options.seed)
    rng = random.Random(options.seed)
    groups = by_length(texts, options.batch)
    known: dict[int, HeadBatch] = {}
    head = Eagle3Head(target)  # type: ignore[arg-type]
    head.scale_fc(states(target, groups[len(groups) // 2]).features)
    extra = [head.fc, head.hidden_norm]
    optimizer = Muon(head, extra, LR, ADAM_LR, dtype=torch.float32)
    begun, before = restore(options.state, head, optimizer)
    start, step, left = time.monotonic(), begun, list[int]()
    saved = start
    window: list[Tensor] = []
    while time.monotonic() < options.end:
        left = left or rng.sample(range(len(groups)), len(groups))
        group = left.pop()
        if group not in known:
            known[group] = states(target, groups[group])
        parts = head_loss(head, target, widened(known[group]), WIDTH)  # type: ignore[arg-type]
        parts[0].backward()
        spent = before + time.monotonic() - start
        optimizer.step(rate(step, spent, before + options.end - start))
        step += 1
        window.append(torch.stack([p.detach() for p in parts]))
        if step % LOG_EVERY == 0:
            mean = [round(x, 3) for x in torch.stack(window).mean(0).tolist()]
            logger.info("step %d, %.0f s: loss and shares right %s", step, spent, mean)
            window = []
        if time.monotonic() - saved > SAVE_EVERY_S:
            save(options, head, optimizer, target, tokenizer, step, spent)
            saved = time.monotonic()
    spent = before + time.monotonic() - start
    save(options, head, optimizer, target, tokenizer, step, spent)
    return head


def by_length(texts: list[Text], size: int) -> list[list[Text]]:
    """Groups of `size` texts of about one length."""
    ordered = sorted(texts, key=lambda text: len(text[0]) + len(text[1]))
    return [ordered[at : at + size] for at in range(0, len(ordered), size)]


def states(target: RealTarget, texts: list[Text]) -> HeadBatch:
    """One batch with the target's states, computed once: 4.6 kB a token in bfloat16."""
    (batch,) = head_batches(target, texts, len(texts))  # type: ignore[arg-type]
    return batch


def widened(batch: HeadBatch) -> HeadBatch:
    """The batch in float32, which most CPUs multiply several times faster."""
    features, hidden = batch.features.float(), batch.hidden.float()
    return replace(batch, features=features, hidden=hidden)


def rate(step: int, spent: float, whole: float) -> float:
    """Of the learning rate: warm-up by steps, then a cosine over the whole time."""
    share = min(1.0, spent / max(whole, 1e-9))
    cosine = FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * share))
    return cosine * min(1.0, (step + 1) / WARM_UP)


def save(
    options: FitOptions,
    head: Eagle3Head,
    optimizer: Muon,
    target: RealTarget,
    tokenizer: Any,
    step: int,
    spent: float,
) -> None:
    """The head for SGLang and what training goes on from, each in one step."""
    export_head(head, target, tokenizer, options.out)
    state = {
        "head": head.state_dict(),
        "adam": optimizer.adam.state_dict(),
        "momentum": optimizer.momentum,
        "step": step,
        "spent": spent,
    }
    unfinished = options.state.with_suffix(".part")
    torch.save(state, unfinished)
    unfinished.replace(options.state)


def restore(path: Path, head: Eagle3Head, optimizer: Muon) -> tuple[int, float]:
    """Steps and seconds of an earlier run, whose state is taken over; 0 without one."""
    if not path.is_file():
        return 0, 0.0
    state = torch.load(path, weights_only=True)
    head.load_state_dict(state["head"])
    optimizer.adam.load_state_dict(state["adam"])
    for ours, theirs in zip(optimizer.momentum, state["momentum"], strict=True):
        ours.copy_(theirs)
    return state["step"], state["spent"]


@torch.no_grad()
def held_out_length(
    head: Eagle3Head, target: RealTarget, texts: list[Text]
) -> dict[str, float]:
    """Greedy chains of WIDTH tokens through texts that nobody trained on.

    A token that the draft vocabulary lacks counts as one that cannot be drafted.
    """
    ours = full_vocabulary(head, target)
    return accept_length(ours, target, texts, WIDTH)  # type: ignore[arg-type]


def full_vocabulary(head: Eagle3Head, target: RealTarget) -> Eagle3Head:
    """The head with a row for every token; those that it cannot draft never win."""
    vocab, hidden = target.embed.shape
    whole = Eagle3Head(replace(target, head=torch.zeros(vocab, hidden)))  # type: ignore[arg-type]
    weights = head.state_dict()
    weights["head"] = torch.zeros(vocab, hidden).index_copy_(
        0, target.tokens, weights["head"]
    )
    whole.load_state_dict(weights)
    lacking = torch.ones(vocab, dtype=torch.bool).index_fill_(0, target.tokens, False)
    plain = whole.logits

    def logits(hidden: Tensor) -> Tensor:
        return plain(hidden).masked_fill(lacking, -math.inf)

    whole.logits = logits  # type: ignore[method-assign]
    return whole
