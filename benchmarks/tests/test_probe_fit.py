"""Learning a probe, held to slow definitions."""

import random
from dataclasses import replace

import pytest
import torch

from benchmarks.train_probe.fit import (
    Pairs,
    auc,
    calibration_error,
    choose_cutoff,
    learn,
    split_requests,
)
from sglang_parse.probe.linear_probe import Learnt, Probe, TargetHashes


def made_pairs(num=1200, width=12, noise=0.5, seed=0, rule=lambda x: x[:, 0] + x[:, 1]):
    made = torch.Generator().manual_seed(seed)
    states = 3 * torch.randn(num, width, generator=made) + 1
    signal = rule(states - 1) / 3 + noise * torch.randn(num, generator=made)
    return Pairs(
        states,
        torch.sigmoid(2 * signal),
        torch.arange(num) // 4,
        torch.zeros(num, dtype=torch.long),
    )


def test_a_linear_probe_finds_a_linear_rule():
    """Red if the fit, the folding of means and spreads, or the report is wrong."""
    fit = learn(made_pairs(), threshold=0.5)
    row = fit.report["by_kind"][0]
    assert row["auc"] > 0.93 and row["agreement"] > 0.85
    probe = Probe(
        Learnt(TargetHashes("c", "w"), "q", (1,), 0.5), (1, 2), 4,
        {"step": fit.cutoffs[0]}, fit.weight, fit.bias,
    )  # fmt: skip
    fresh = made_pairs(seed=5)
    found = probe.scores(fresh.states) >= fit.cutoffs[0]
    assert float((found == (fresh.scores >= 0.5)).float().mean()) > 0.85


def test_requests_are_split_and_not_pairs():
    """Red if pairs of one request are both learnt from and reported on."""
    requests = torch.tensor([k % 17 for k in range(200)])
    held = split_requests(requests, 0.25, 3)
    inside = set(requests[held].tolist())
    assert inside.isdisjoint(requests[~held].tolist()) and len(inside) == 4


def test_too_few_pairs_are_refused():
    """Red if a probe is learnt where nothing was ever rejected."""
    pairs = made_pairs(num=80)
    with pytest.raises(ValueError, match="collect more"):
        learn(Pairs(pairs.states, torch.ones(80), pairs.requests, pairs.kinds),
              threshold=0.5)  # fmt: skip


def test_auc_and_calibration_equal_their_definitions():
    """Red if a figure of the report is not what its name says."""
    rng = random.Random(0)
    for _ in range(20):
        scores = [rng.choice([0.1, 0.3, 0.5, 0.9, rng.random()]) for _ in range(30)]
        valid = [rng.random() < 0.6 for _ in scores]
        good = [s for s, v in zip(scores, valid, strict=True) if v]
        bad = [s for s, v in zip(scores, valid, strict=True) if not v]
        if not good or not bad:
            continue
        wins = sum((g > b) + 0.5 * (g == b) for g in good for b in bad)
        found = auc(torch.tensor(scores), torch.tensor(valid))
        assert found == pytest.approx(wins / len(good) / len(bad))
        error = 0.0
        for k in range(10):
            inside = [i for i, s in enumerate(scores) if min(9, int(s * 10)) == k]
            if inside:
                mean = sum(scores[i] for i in inside) / len(inside)
                share = sum(valid[i] for i in inside) / len(inside)
                error += abs(mean - share) * len(inside) / len(scores)
        found = calibration_error(torch.tensor(scores), torch.tensor(valid))
        assert found == pytest.approx(error, abs=1e-5)


def test_the_cutoff_has_most_agreement():
    """Red if another cutoff agrees more."""
    rng = random.Random(2)
    for _ in range(20):
        scores = [rng.random() for _ in range(200)]
        valid = [rng.random() < s for s in scores]
        pairs = list(zip(scores, valid, strict=True))

        def agreement(cutoff, pairs=pairs):
            return sum((s >= cutoff) == v for s, v in pairs)

        cutoff = choose_cutoff(torch.tensor(scores), torch.tensor(valid))
        assert agreement(cutoff) == max(agreement(s) for s in [*scores, 2.0])


def test_gold_labels_are_learnt_where_the_question_errs():
    """Red if a probe of gold labels learns the question's verdicts, or pairs without a
    label take part."""
    pairs = made_pairs(num=2000, noise=0.1)
    gold = (pairs.states[:, 2] > 1).long()
    unknown = torch.arange(2000) % 5 == 0
    pairs = replace(pairs, gold=gold.masked_fill(unknown, -1))
    fit = learn(pairs, threshold=0.5, labels="gold")
    assert fit.labels == "gold" and fit.report["learning_pairs"] < 1000
    row = fit.report["by_kind"][0]
    assert row["gold"]["probe"]["true_accepts"] > 0.95
    assert row["gold"]["probe"]["false_accepts"] < 0.05
    assert 0.4 < row["gold"]["question"]["false_accepts"] < 0.6
    assert row["agreement"] < 0.6
