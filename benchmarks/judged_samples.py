"""Drafts of the embedded task with the target's verdicts, without a server.

For every prefix of a sampled answer that ends with a step: what a probe would read, the
question's score and the checker's label; for every token, the draft's hidden state.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from benchmarks.train_pair.data import Examples, collate
from benchmarks.train_pair.export import load
from benchmarks.train_pair.tokenizer import (
    SHORT_QUESTION,
    Encoder,
    judge_suffix,
    load_tokenizer,
)
from benchmarks.train_pair.train import sample
from sglang_parse.embedded import TARGET_PATH
from sglang_parse.embedded.task import Problem
from sglang_parse.probe.linear_probe import usual_layers

QUESTION = SHORT_QUESTION
AT_ONCE, ANSWERS_AT_ONCE = 100, 25
T = TypeVar("T")


@dataclass(frozen=True)
class Answer:
    """One sampled answer.

    ends: tokens up to the end of each step. scores: of the question there. right:
    whether the checker finds the prefix right. states: [steps, width] float16 that a
    probe reads. draft_states: [tokens, hidden] float16 that predicted each token.
    """

    ends: tuple[int, ...]
    scores: tuple[float, ...]
    right: tuple[bool, ...]
    states: Tensor
    draft_states: Tensor


def parts(items: Sequence[T], num: int) -> Iterator[Sequence[T]]:
    """Parts of so many items, one after another."""
    return (items[start : start + num] for start in range(0, len(items), num))


class Sampler:
    """The shipped target with its question."""

    def __init__(self) -> None:
        self.tokenizer: Any = load_tokenizer(TARGET_PATH)
        self.encoder = Encoder(self.tokenizer)
        self.target: Any = load(TARGET_PATH)
        self.layers = usual_layers(self.target.cfg.layers)
        self.suffix: list[int] = judge_suffix(self.tokenizer, QUESTION)
        yes_no = [self.encoder.ids(word)[0] for word in ("No", "Yes")]
        self._yes_no = torch.tensor(yes_no)
        self._make = Examples(self.encoder)

    def answers(
        self, problems: Sequence[Problem], draft_path: Path, temperature: float
    ) -> list[Answer]:
        """Answers of a draft, judged. Seeded by their places."""
        draft: Any = load(draft_path)
        texts: list[str] = []
        for some in parts(problems, AT_ONCE):
            texts += sample(draft, self.encoder, some, temperature, seed=len(texts))
        found: list[Answer] = []
        pairs = list(zip(problems, texts, strict=True))
        for part in parts(pairs, ANSWERS_AT_ONCE):
            found += self._judged(draft, [(p, text or "?") for p, text in part])
        return found

    @torch.no_grad()
    def _judged(
        self, draft: Any, pairs: Sequence[tuple[Problem, str]]
    ) -> Iterator[Answer]:
        examples = [self._make.from_sample(p, text) for p, text in pairs]
        judged = [list(range(len(e.ends))) for e in examples]
        batch = collate(examples, self.suffix, judged)
        hidden, shown = self.target(
            batch.ids, batch.positions, batch.mask.float(), torch.float32,
            taps=self.layers,
        )  # fmt: skip
        at = hidden[torch.arange(len(hidden))[:, None], batch.verdict_rows]
        scores = self.target.logits(at)[..., self._yes_no].softmax(-1)[..., 1]
        length = max(len(e.prompt) + len(e.answer) for e in examples)
        causal = torch.ones(length, length).tril().log()[None, None]
        own, _ = draft(
            batch.ids[:, :length], batch.positions[:, :length], causal, torch.float32
        )
        every = torch.cat([*(shown[layer] for layer in self.layers), hidden], dim=-1)
        answers = []
        for i, e in enumerate(examples):
            start = len(e.prompt)
            bad = len(e.ends) if e.first_bad is None else e.first_bad
            rows = torch.tensor([start + end - 1 for end in e.ends])
            answers.append(
                Answer(
                    tuple(e.ends),
                    tuple(scores[i, : len(e.ends)].tolist()),
                    tuple(k < bad for k in range(len(e.ends))),
                    every[i, rows].half(),
                    own[i, start - 1 : start - 1 + e.ends[-1]].half(),
                )
            )
        return iter(answers)
