"""Exact mode and the exact tail are distributed as the target, whatever the draft."""

import itertools

import pytest
import torch

from sglang_parse.judging.decide import Cut, decide, exact_cut

VOCAB = 4
WIDTH = 3
NUM_SAMPLES = 30_000
# 99.99th percentile of chi-square with VOCAB**WIDTH - 1 = 63 degrees of freedom.
CHI_SQUARE_LIMIT = 114.8


def draw(probs: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """One token per row of probs [n, VOCAB]."""
    return torch.multinomial(probs, 1, generator=generator)[:, 0]


def rollouts(tail_end: int, seed: int) -> tuple[list[tuple[int, ...]], torch.Tensor]:
    """First WIDTH output tokens of NUM_SAMPLES requests, by rounds of draft and
    verify, and the target's transition matrix. Token 0 is the context."""
    generator = torch.Generator().manual_seed(seed)
    target = torch.rand(VOCAB, VOCAB, generator=generator).softmax(-1) ** 2
    target /= target.sum(-1, keepdim=True)
    draft = torch.rand(VOCAB, VOCAB, generator=generator)
    draft /= draft.sum(-1, keepdim=True)
    outputs: list[list[int]] = [[] for _ in range(NUM_SAMPLES)]
    while True:
        open_ = [i for i, o in enumerate(outputs) if len(o) < WIDTH]
        if not open_:
            return [tuple(o[:WIDTH]) for o in outputs], target
        last = torch.tensor([outputs[i][-1] if outputs[i] else 0 for i in open_])
        columns = [last]
        for _ in range(WIDTH):
            columns.append(draw(draft[columns[-1]], generator))
        chosen = torch.stack([draw(target[c], generator) for c in columns], dim=1)
        drafted = torch.stack(columns[1:], dim=1)
        rows = zip(open_, drafted.tolist(), chosen.tolist(), strict=True)
        for i, tokens, target_tokens in rows:
            cut = exact_cut(WIDTH) if tail_end == WIDTH else Cut(0, tail_end, False)
            taken = target_tokens[: tail_end + 1]
            outputs[i] += decide(cut, tokens, taken).accept_tokens


def chi_square(samples: list[tuple[int, ...]], target: torch.Tensor) -> float:
    counts = dict.fromkeys(itertools.product(range(VOCAB), repeat=WIDTH), 0)
    for sample in samples:
        counts[sample] += 1
    total = 0.0
    for sequence, count in counts.items():
        expected = float(NUM_SAMPLES)
        for previous, token in zip((0, *sequence), sequence, strict=False):
            expected *= float(target[previous, token])
        total += (count - expected) ** 2 / expected
    return total


@pytest.mark.parametrize("tail_end", [WIDTH, 2, 0])
def test_exact_tail_samples_the_target_distribution(tail_end):
    """Red if a draft token is kept for any reason but the target drawing it."""
    samples, target = rollouts(tail_end, seed=tail_end)
    assert chi_square(samples, target) < CHI_SQUARE_LIMIT


def test_chi_square_notices_a_biased_rule(monkeypatch):
    """The test above can fail: keeping draft tokens unseen is caught."""

    monkeypatch.setitem(globals(), "decide", keep_first_of(decide))
    samples, target = rollouts(WIDTH, seed=1)
    assert chi_square(samples, target) > CHI_SQUARE_LIMIT


def keep_first_of(real):
    """A rule that keeps the first draft token whatever the target drew."""

    def rule(cut, draft_tokens, target_tokens):
        return real(Cut(1, 1, False), draft_tokens, target_tokens[1:2])

    return rule
