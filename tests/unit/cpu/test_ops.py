"""Torch stand-ins for Triton kernels."""

import random

import torch

from sglang_parse.cpu.ops import assign_req_to_token_pool


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
