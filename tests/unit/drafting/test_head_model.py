"""A head: its chain, and what it follows."""

from __future__ import annotations

import math

import pytest
import torch

from sglang_parse.drafting.head_model import ChainRequest, HeadHint, HeadRows
from tests.support.counting import VOCAB, CountingHead

TABLE = 100 * torch.arange(4)[:, None] + torch.arange(40)


def hint(token: int, hidden: float = 0.0) -> HeadHint:
    return HeadHint(torch.tensor(token), torch.tensor([hidden]), torch.tensor(0.5))


def test_chain_is_fed_its_own_tokens_and_hidden_states():
    """Red if a step reads the hidden state of another step, or writes its KV at
    another position than the token before it."""
    head = CountingHead()
    orders = [ChainRequest(1, 10, 4, hint(5, 0.5)), ChainRequest(3, 20, 2, hint(30))]
    chains = head.propose(orders, TABLE)
    assert [c.tokens for c in chains] == [(5, 6, 7, 8), (30, 31)]
    # The hint's own opinion, then that of each step: one logit of 1, the others of 0.
    sure = math.e / (math.e + VOCAB - 1)
    assert [c.chances for c in chains] == [
        pytest.approx((0.5, sure, sure, sure)), pytest.approx((0.5, sure)),
    ]  # fmt: skip
    steps = head.batches
    assert [b.input_ids.tolist() for b in steps] == [[5, 30], [6, 31], [7, 32]]
    assert [b.positions.tolist() for b in steps] == [[10, 20], [11, 20], [12, 20]]
    assert [b.out_cache_loc.tolist() for b in steps] == [
        [110, 320], [111, 320], [112, 320],
    ]  # fmt: skip
    states = [b.spec_info.hidden_states[0].item() for b in steps]
    assert states == [0.5, 5.5, 11.5]


def test_chain_of_one_needs_no_forward():
    """Red if the token at hand is computed again."""
    head = CountingHead()
    (chain,) = head.propose([ChainRequest(0, 3, 1, hint(9))], TABLE)
    assert chain.tokens == (9,)
    assert head.batches == []


def test_reduced_vocabulary_is_mapped_back():
    """Red if a head with its own vocabulary (d2t) drafts its own ids."""
    head = CountingHead()
    head.hot_token_id = torch.arange(VOCAB) * 10
    rows = [HeadRows(0, 2, [3, 4], torch.zeros(2, 6))]
    assert head.follow(rows, TABLE)[0].token.item() == 50


def test_follow_is_one_ragged_pass_over_the_kept_rows():
    """Red if a position is forwarded with another position's token or features."""
    head = CountingHead()
    rows = [
        HeadRows(1, 4, [7, 8, 9], torch.tensor([[1.0], [2.0], [3.0]])),
        HeadRows(2, 0, [5], torch.tensor([[4.0]])),
    ]
    hints = head.follow(rows, TABLE)
    (batch,) = head.batches
    assert batch.input_ids.tolist() == [7, 8, 9, 5]
    assert batch.positions.tolist() == [4, 5, 6, 0]
    assert batch.out_cache_loc.tolist() == [104, 105, 106, 200]
    assert batch.seq_lens.tolist() == [7, 1]
    assert batch.extend_prefix_lens.tolist() == [4, 0]
    assert batch.spec_info.hidden_states.flatten().tolist() == [1, 2, 3, 4]
    assert [h.token.item() for h in hints] == [10, 6]
    assert [h.hidden.item() for h in hints] == [12.0, 9.0]
