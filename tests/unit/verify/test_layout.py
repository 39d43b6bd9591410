"""Rows, positions and masks of the verify pass equal the nested-loop oracle."""

import random

import pytest
import torch

from sglang_parse.verify.layout import (
    PassRequest,
    RowVisibility,
    VerifyPlan,
    build_custom_mask,
    build_verify_plan,
    expand_mask,
)
from tests.support.passes import Request, random_request
from tests.support.reference import row_labels, verify_mask, verify_positions

NAMED = {
    "empty draft": (5, 0, (), 0),
    "empty draft beside a suffix": (5, 0, (), 3),
    "draft without boundary": (5, 4, (), 3),
    "one segment": (3, 4, (2,), 3),
    "boundary at 1": (3, 4, (1,), 2),
    "boundary at the end": (3, 4, (4,), 2),
    "every token a segment": (2, 3, (1, 2, 3), 1),
    "one-token context": (1, 2, (1, 2), 4),
    "long suffix": (2, 2, (1,), 9),
}


def build(requests: list[Request]) -> VerifyPlan:
    """Plan whose token ids say where they come from: request, then running number."""
    return build_verify_plan(
        [
            PassRequest(
                seq_len=seq_len,
                bonus_token=1000 * i,
                draft_tokens=[1000 * i + 1 + t for t in range(num_draft)],
                boundaries=cuts,
                suffix=tuple(1000 * i + 500 + t for t in range(suffix_len)),
            )
            for i, (seq_len, num_draft, cuts, suffix_len) in enumerate(requests)
        ]
    )


def flat_oracle_mask(requests: list[Request]) -> list[bool]:
    return [cell for r in requests for line in verify_mask(*r) for cell in line]


@pytest.mark.parametrize("request_", NAMED.values(), ids=NAMED.keys())
def test_mask_of_one_request_equals_oracle(request_):
    """Red if a suffix sees a later token, another suffix or too little context."""
    plan = build([request_])
    assert build_custom_mask(plan).tolist() == flat_oracle_mask([request_])


@pytest.mark.parametrize("seed", range(30))
def test_mask_of_ragged_batch_equals_oracle(seed):
    """Red if a request's columns or rows are counted from another request's start."""
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(rng.randint(1, 6))]
    plan = build(requests)
    assert build_custom_mask(plan).tolist() == flat_oracle_mask(requests)


@pytest.mark.parametrize("seed", range(30))
def test_positions_equal_oracle(seed):
    """Red if a suffix's positions continue at the draft's end, or one too early."""
    rng = random.Random(100 + seed)
    requests = [random_request(rng) for _ in range(4)]
    expected = [p for r in requests for p in verify_positions(*r)]
    assert build(requests).positions.tolist() == expected


@pytest.mark.parametrize("seed", range(10))
def test_input_ids_and_named_rows_equal_oracle(seed):
    """Red if rows change their order, or a verdict is read off a suffix's end."""
    rng = random.Random(200 + seed)
    requests = [random_request(rng) for _ in range(4)]
    plan = build(requests)
    ids: list[int] = []
    roots = []
    verdicts = []
    for i, (_, num_draft, cuts, suffix_len) in enumerate(requests):
        roots.append(len(ids))
        last = {}
        for kind, a, b in row_labels(num_draft, cuts, suffix_len):
            if kind == "suffix":
                last[a] = len(ids)
            number = {"draft": a, "suffix": 500 + b}[kind]
            ids.append(1000 * i + number)
        verdicts.append(tuple(last[k] for k in range(len(cuts))))
    assert plan.input_ids.tolist() == ids
    assert plan.root_rows == tuple(roots)
    assert plan.verdict_rows == tuple(verdicts)


@pytest.mark.parametrize("seed", range(10))
def test_lengths_and_counts_add_up(seed):
    """Red if scratch slots are counted for draft rows, or the bonus row is lost."""
    rng = random.Random(300 + seed)
    requests = [random_request(rng) for _ in range(5)]
    plan = build(requests)
    rows = [len(row_labels(*r[1:])) for r in requests]
    assert plan.qo_lens == tuple(rows)
    assert plan.kv_lens == tuple(r[0] + n for r, n in zip(requests, rows, strict=True))
    assert plan.num_verify_tokens == sum(rows) == len(plan.input_ids)
    assert plan.num_suffix_tokens == sum(len(r[2]) * r[3] for r in requests)
    assert plan.row_columns == tuple(r[0] + 1 + r[1] for r in requests)
    assert len(build_custom_mask(plan)) == sum(
        q * k for q, k in zip(plan.qo_lens, plan.kv_lens, strict=True)
    )


def test_mask_suffix_cannot_see_later_segment():
    """The claim of the method in one line, without the oracle."""
    mask = build_custom_mask(build([(2, 4, (2,), 1)])).view(6, 8)
    assert mask[5].tolist() == [True, True, True, True, True, False, False, True]


@pytest.mark.parametrize(
    ("cuts", "suffix"),
    [((3,), (7,)), ((0,), (7,)), ((1,), ())],
    ids=["beyond the draft", "at zero", "no suffix"],
)
def test_plan_refuses_impossible_boundary(cuts, suffix):
    """Red if a boundary outside the draft silently judges another prefix."""
    with pytest.raises(ValueError, match="need a suffix and a draft"):
        PassRequest(4, 1, [2, 3], cuts, suffix)


def test_visibility_causal_and_rows():
    """Red if a causal row has a second span, or `rows` drops a field."""
    causal = RowVisibility.causal(torch.tensor([0, 2]))
    assert expand_mask(causal, 4).tolist() == [
        [True, False, False, False],
        [True, True, True, False],
    ]
    picked = causal.rows(torch.tensor([[1, 1], [0, 1]]))
    assert expand_mask(picked, 3).sum(-1).tolist() == [[3, 3], [1, 3]]
