"""What an early stop of drafts saves and loses, held to a count token by token."""

import random

import torch

from benchmarks.judged_samples import Answer
from benchmarks.stop_early import num_kept, stops_at, sums


def made(rng):
    """An answer of random steps and verdicts."""
    ends, at = [], 0
    for _ in range(rng.randint(1, 5)):
        at += rng.randint(1, 6)
        ends.append(at)
    scores = tuple(rng.random() for _ in ends)
    empty = torch.zeros(0)
    return Answer(tuple(ends), scores, tuple(s > 0.5 for s in scores), empty, empty)


def test_tokens_are_counted_once():
    """Red if a token counts as saved and as drafted, or a kept one behind the stop is
    not lost."""
    rng = random.Random(5)
    for _ in range(200):
        answer, window = made(rng), rng.randint(1, 30)
        own = torch.tensor([rng.random() for _ in range(answer.ends[-1])])
        found = sums([answer], [own], 0.3, window)
        drafted = list(range(min(window, len(own))))
        written = []
        for k in drafted:
            if own[k] < 0.3:
                break
            written.append(k)
        kept, kept_early = 0, 0
        for end, score in zip(answer.ends, answer.scores, strict=True):
            if score < 0.5:
                break
            kept = end if end <= len(drafted) else kept
            kept_early = end if end <= len(written) else kept_early
        assert stops_at(own, 0.3, window) == len(written)
        assert num_kept(answer, window) == found.kept == kept
        assert found.drafted == len(drafted)
        assert found.saved == len(drafted) - len(written)
        assert found.lost == kept - kept_early
