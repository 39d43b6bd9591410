"""Pairs that a server keeps: bounded, and a uniform sample of all."""

import torch

from sglang_parse.probe.pair_collector import PairCollector


class Owner:
    pass


def test_memory_is_bounded_and_the_sample_uniform():
    """Red if more is kept than asked, or if the first or last pairs are favoured."""
    counts = torch.zeros(100)
    for seed in range(300):
        pairs, owner = PairCollector(10, 1, seed=seed), Owner()
        for k in range(100):
            state = torch.tensor([[float(k)]])
            pairs.add(owner, state, [k / 100], segmenter="step", rid="r")
        part = pairs.part(0, 1000)
        assert len(pairs) == len(part.states) == len(part.scores) == 10
        assert len(part.requests) == len(part.indices) == len(part.segmenters) == 10
        states = part.states[:, 0].tolist()
        for row, value, index in zip(states, part.scores, part.indices, strict=True):
            assert index == row
            assert row == round(100 * value)
            counts[int(row)] += 1
    assert counts.sum() == 3000
    assert 22 <= counts[:50].mean() <= 38 and counts.min() > 8


def test_verdicts_are_numbered_by_request_and_parts_join():
    """Red if two requests share a count of verdicts, or a part repeats pairs."""
    pairs, a, b = PairCollector(100, 2), Owner(), Owner()
    for owner, rid in ((a, "a"), (b, "b"), (a, "a")):
        states = torch.zeros(3, 2, dtype=torch.bfloat16)
        pairs.add(owner, states, [0.1] * 3, segmenter="step", rid=rid)
    parts = [pairs.part(start, 4) for start in (0, 4, 8)]
    found = [
        one for part in parts for one in zip(part.requests, part.indices, strict=True)
    ]
    assert found == [
        *(("a", k) for k in range(3)), *(("b", k) for k in range(3)),
        *(("a", k) for k in range(3, 6)),
    ]  # fmt: skip
    pairs.clear()
    assert len(pairs) == 0 and pairs.part(0, 4).scores == []
