"""Training of the head over some epochs, with checkpoints that it goes on from."""

from __future__ import annotations

import logging
import math
import random
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from benchmarks.train_pair.model import Muon
from benchmarks.train_pair.train_head import HeadBatch, accept_length, head_loss
from benchmarks.train_real.decode import Answer
from benchmarks.train_real.export import export_head, go_on_from
from benchmarks.train_real.target import RealHead, RealTarget

logger = logging.getLogger("train_real")
LR, ADAM_LR = 0.01, 1e-3
WARM_UP = 20  # steps
FINAL = 0.02  # of the learning rate, at the last step
LOG_EVERY = 10  # steps
SAVE_EVERY_S = 300.0
SIZED = 64  # answers that tell the size of the features
WIDTH = 4  # tokens of a drafted chain
DEPTH = 3  # of them that are trained: the last is as often right as the one before


@dataclass(frozen=True)
class FitOptions:
    #: Folder of the head.
    out: Path
    #: File that training goes on from.
    state: Path
    #: When to stop, of time.monotonic(), though steps are left.
    end: float
    #: How often each answer is trained on.
    epochs: int
    #: Answers of one step.
    batch: int
    seed: int
    #: Of the products.
    dtype: torch.dtype
    #: Folder of an exported head that training begins with, None for a new head.
    start: Path | None = None


class Fitting:
    """A head in training, and what another run needs to go on with it."""

    def __init__(
        self, target: RealTarget, answers: list[Answer], options: FitOptions
    ) -> None:
        torch.manual_seed(options.seed)
        self.target, self.options, self.step = target, options, 0
        self.groups = grouped(answers, options.batch)
        self.steps = options.epochs * len(self.groups)
        self.head = RealHead(target)
        self.head.scale_fc(own_features(answers[:SIZED]))
        if options.start:
            go_on_from(self.head, options.start)
        extra = [self.head.fc, self.head.hidden_norm]
        self.optimizer = Muon(self.head, extra, LR, ADAM_LR, dtype=options.dtype)
        if options.state.is_file():
            self.load(torch.load(options.state, weights_only=True))

    def one_step(self) -> Tensor:
        """[1 + DEPTH]: the loss before this step, and the share right of each draft."""
        order = nth_order(len(self.groups), self.step, self.options.seed)
        batch = head_batch(self.groups[order], self.options.dtype)
        parts = head_loss(self.head, self.target, batch, DEPTH)  # type: ignore[arg-type]
        parts[0].backward()
        self.optimizer.step(rate(self.step, self.steps))
        self.step += 1
        return torch.stack([p.detach() for p in parts])

    def run(self, tokenizer: Any) -> RealHead:
        """Step until all are done or the time is over; the head is written."""
        saved, window = time.monotonic(), list[Tensor]()
        while self.step < self.steps and time.monotonic() < self.options.end:
            window.append(self.one_step())
            if self.step % LOG_EVERY == 0:
                self.log(torch.stack(window).mean(0))
                window = []
            if time.monotonic() - saved > SAVE_EVERY_S:
                self.save(tokenizer)
                saved = time.monotonic()
        self.save(tokenizer)
        return self.head

    def log(self, mean: Tensor) -> None:
        logger.info(
            "step %d of %d, %.0f s of CPU time: loss and shares right %s",
            *(self.step, self.steps, time.process_time()),
            [round(x, 3) for x in mean.tolist()],
        )

    def trained(self) -> dict[str, Tensor]:
        """What training sets, by name: all but the target's embedding."""
        named = self.head.state_dict()
        return {name: p for name, p in named.items() if name != "embed"}

    def save(self, tokenizer: Any) -> None:
        """The head for SGLang and the state of training, each in one step."""
        export_head(self.head, self.target, tokenizer, self.options.out)
        state = {
            "head": self.trained(),
            "adam": self.optimizer.adam.state_dict(),
            "momentum": self.optimizer.momentum,
            "step": self.step,
        }
        unfinished = self.options.state.with_suffix(".part")
        torch.save(state, unfinished)
        unfinished.replace(self.options.state)

    def load(self, state: dict[str, Any]) -> None:
        """Go on from what `save` wrote."""
        for name, p in self.trained().items():
            p.copy_(state["head"][name])
        self.optimizer.adam.load_state_dict(state["adam"])
        for ours, theirs in zip(
            self.optimizer.momentum, state["momentum"], strict=True
        ):
            ours.copy_(theirs)
        self.step = state["step"]


def grouped(answers: list[Answer], size: int) -> list[list[Answer]]:
    """Groups of `size` answers of about one length."""
    ordered = sorted(answers, key=lambda a: len(a.context) + len(a.own))
    return [ordered[at : at + size] for at in range(0, len(ordered), size)]


def nth_order(groups: int, step: int, seed: int) -> int:
    """The group of a step: each epoch has an order of its own."""
    epoch, at = divmod(step, groups)
    return random.Random(f"{seed}/{epoch}").sample(range(groups), groups)[at]


def head_batch(answers: list[Answer], dtype: torch.dtype) -> HeadBatch:
    """The answers padded behind; their states are what decoding computed.

    No state is known of an answer's last token, and none is needed.
    """
    texts = [torch.tensor(a.context + a.own) for a in answers]
    ids = pad_sequence(texts, batch_first=True)
    states = pad_sequence([a.states for a in answers], batch_first=True)
    states = torch.nn.functional.pad(states, (0, 0, 0, 1)).to(dtype)
    width = states.shape[-1] // 4
    features, hidden = states.split((3 * width, width), -1)
    first = torch.tensor([len(a.context) for a in answers])
    end = torch.tensor([len(t) for t in texts])
    return HeadBatch(ids, features, hidden, first, end)


def own_features(answers: list[Answer]) -> Tensor:
    """[N, 3 * D], of the rows that the target answered from.

    The first row of a context is left out: its values are many times larger.
    """
    rows = torch.cat([a.states[len(a.context) - 1 :] for a in answers])
    return rows[:, : 3 * rows.shape[1] // 4]


def rate(step: int, steps: int) -> float:
    """Of the learning rate: a warm-up, then a cosine over all steps."""
    cosine = FINAL + (1 - FINAL) * 0.5 * (1 + math.cos(math.pi * step / steps))
    return cosine * min(1.0, (step + 1) / WARM_UP)


@torch.no_grad()
def held_out_length(
    head: RealHead, answers: list[Answer], batch: int, dtype: torch.dtype
) -> dict[str, float]:
    """Greedy chains of WIDTH tokens through answers that nobody trained on.

    A token that the draft vocabulary lacks counts as one that cannot be drafted.
    """
    batches = (head_batch(group, dtype) for group in grouped(answers, batch))
    return accept_length(head, batches, WIDTH)
