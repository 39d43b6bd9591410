"""Torch stand-ins for Triton kernels."""

import math
import random

import pytest
import torch
from sglang.srt.layers.moe.topk import StandardTopKOutput

from sglang_parse.cpu.ops import (
    add_shared_expert,
    assign_req_to_token_pool,
    normalize,
    skip_others_experts,
    softcap,
    squares,
)


def test_assign_req_to_token_pool_equals_oracle():
    """Red if slots land in another row or column, or other columns are touched."""
    rng = random.Random(0)
    table = torch.zeros(6, 20, dtype=torch.int32)
    rows = [4, 0, 5, 2]
    starts = [3, 0, 7, 10]
    ends = [5, 6, 7, 20]  # one request gets nothing
    slots = rng.sample(range(1, 1000), sum(ends) - sum(starts))
    expected = [[0] * 20 for _ in range(6)]
    at = iter(slots)
    for row, start, end in zip(rows, starts, ends, strict=True):
        for column in range(start, end):
            expected[row][column] = next(at)
    assign_req_to_token_pool(
        torch.tensor(rows),
        table,
        torch.tensor(starts, dtype=torch.int32),
        torch.tensor(ends, dtype=torch.int32),
        torch.tensor(slots),
        len(rows),
    )
    assert table.tolist() == expected


def test_softcap_bounds_logits_in_place():
    """Red if Gemma 2's logits are not bounded, or a copy of them is."""
    logits = torch.tensor([[-100.0, -1.0, 0.0, 2.0, 1000.0]])
    expected = [30 * math.tanh(x / 30) for x in logits[0].tolist()]
    assert softcap(logits, 30.0) is logits
    assert logits[0].tolist() == pytest.approx(expected, abs=1e-5)


def test_queries_and_keys_of_minimax_are_normalized_over_all_ranks():
    """Red if a row is scaled by another's sum, or by the share of one rank alone."""
    torch.manual_seed(0)
    rows, ranks, eps = 3, 2, 0.1
    q, k = torch.randn(rows, ranks, 8), torch.randn(rows, ranks, 4)
    wq, wk = torch.randn(ranks, 8), torch.randn(ranks, 4)
    sums = sum(squares(q[:, i], k[:, i]) for i in range(ranks))
    for i in range(ranks):
        found = normalize(q[:, i], k[:, i], wq[i], wk[i], sums, ranks, eps)
        for x, weight, mine in zip((q, k), (wq, wk), found, strict=True):
            for row in range(rows):
                values = x[row].flatten().tolist()
                root = math.sqrt(sum(v * v for v in values) / len(values) + eps)
                expected = (x[row, i] * weight[i] / root).tolist()
                assert mine[row].tolist() == pytest.approx(expected, abs=1e-5)


def test_a_shared_expert_is_added_by_its_gate():
    """Red if a row is scaled by another's gate, or replaces the other experts."""
    x, gate = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([0.5, 1.0])
    output = torch.tensor([[1.0, 1.0], [2.0, 2.0]])
    add_shared_expert(x, gate, torch.tensor([[4.0, 8.0], [2.0, 0.0]]), output)
    one, other = (1 / (1 + math.exp(-v)) for v in (2.5, -1.0))
    expected = [1 + 4 * one, 1 + 8 * one, 2 + 2 * other, 2.0]
    assert output.flatten().tolist() == pytest.approx(expected, abs=1e-5)


def test_experts_of_other_ranks_add_nothing():
    """Red if -1 is taken for an index, or a token's sum has another expert in it."""
    weights = torch.tensor([[0.5, 0.25], [2.0, 1.0], [4.0, 8.0], [1.0, 3.0]])
    ids = torch.tensor([[1, 0], [-1, 1], [-1, -1], [0, -1]])
    x = torch.tensor([[1.0], [10.0], [100.0], [1000.0]])

    def original(layer, x, chosen):
        assert (chosen.topk_ids >= 0).all()
        each = x * (chosen.topk_ids + 1) * chosen.topk_weights
        return each.sum(1, keepdim=True)

    chosen = StandardTopKOutput(weights, ids, x)
    expected = [[0.5 * 2 + 0.25], [10.0 * 2], [0.0], [1000.0]]
    assert skip_others_experts(original, None, x, chosen).tolist() == expected
    none = StandardTopKOutput(weights[2:3], ids[2:3], x[2:3])
    assert skip_others_experts(original, None, x[2:3], none).tolist() == [[0.0]]
    mine = StandardTopKOutput(weights[:1], ids[:1], x[:1])
    assert skip_others_experts(original, None, x[:1], mine).tolist() == [[1.25]]
