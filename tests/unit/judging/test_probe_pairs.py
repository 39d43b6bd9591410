"""Pairs that a server keeps: bounded, and a uniform sample of all."""

import torch

from sglang_parse.judging.probe_pairs import PairCollector


class Owner:
    pass


def test_memory_is_bounded_and_the_sample_uniform():
    """Red if more is kept than asked, or if the first or last pairs are favoured."""
    counts = torch.zeros(100)
    for seed in range(300):
        pairs, owner = PairCollector(10, 1, seed=seed), Owner()
        for k in range(100):
            pairs.add(owner, torch.tensor([[float(k)]]), [k / 100], "step")
        states, scores, owners, names = pairs.part(0, 1000)
        assert len(pairs) == len(states) == len(scores) == len(owners) == 10
        for row, value in zip(states[:, 0].tolist(), scores, strict=True):
            assert row == round(100 * value)
            counts[int(row)] += 1
    assert counts.sum() == 3000
    assert 22 <= counts[:50].mean() <= 38 and counts.min() > 8


def test_requests_are_numbered_and_parts_join():
    """Red if two requests share a number, or a part repeats pairs."""
    pairs, a, b = PairCollector(100, 2), Owner(), Owner()
    for owner in (a, b, a):
        pairs.add(owner, torch.zeros(3, 2, dtype=torch.bfloat16), [0.1] * 3, "step")
    found = [n for start in (0, 4, 8) for n in pairs.part(start, 4)[2]]
    assert found == [0, 0, 0, 1, 1, 1, 0, 0, 0]
    pairs.clear()
    assert len(pairs) == 0 and pairs.part(0, 4)[1] == []
