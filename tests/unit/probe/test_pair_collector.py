"""Pairs that a server keeps: bounded, and a uniform sample of all."""

import torch

from sglang_parse.probe.pair_collector import PairCollector


class Owner:
    pass


def test_memory_is_bounded_and_the_sample_uniform():
    """Red if more is kept than asked, or if the first or last pairs are favoured."""
    counts = torch.zeros(100)
    for seed in range(300):
        pairs, owner = PairCollector(10, seed=seed), Owner()
        for k in range(100):
            state = torch.tensor([[float(k)]])
            pairs.add(owner, state, [k / 100], segmenter="step", rid="r")
        assert len(pairs.pairs) == 10 and pairs.num_seen == 100
        for one in pairs.pairs:
            assert one.index == float(one.state) == round(100 * one.score)
            counts[one.index] += 1
    assert counts.sum() == 3000
    assert 22 <= counts[:50].mean() <= 38 and counts.min() > 8


def test_verdicts_are_numbered_by_request():
    """Red if two requests share a count of verdicts."""
    pairs, a, b = PairCollector(100), Owner(), Owner()
    for owner, rid in ((a, "a"), (b, "b"), (a, "a")):
        states = torch.zeros(3, 2, dtype=torch.bfloat16)
        pairs.add(owner, states, [0.1] * 3, segmenter="step", rid=rid)
    assert [(one.request, one.index) for one in pairs.pairs] == [
        *(("a", k) for k in range(3)), *(("b", k) for k in range(3)),
        *(("a", k) for k in range(3, 6)),
    ]  # fmt: skip
    pairs.clear()
    assert not pairs.pairs and pairs.num_seen == 0
