"""Rows of `req_to_token`: what PARSE writes into them, against their width."""

from types import SimpleNamespace

import pytest
import torch

from sglang_parse.integration.algorithm import NUM_DRAFT_TOKENS
from sglang_parse.policy.windows import draft_window
from sglang_parse.runtime.slots import RoundSlots

pytestmark = pytest.mark.usefixtures("plugins")


@pytest.fixture
def published(monkeypatch):
    """SGLang's published configuration as far as the sizes of rows depend on it."""
    from sglang.srt.mem_cache import allocation_sizing

    spec = SimpleNamespace(
        speculative_algorithm="PARSE",
        speculative_num_steps=1,
        speculative_eagle_topk=1,
    )
    monkeypatch.setattr(allocation_sizing, "get_spec", lambda: spec)
    monkeypatch.setattr(
        allocation_sizing, "max_speculative_num_draft_tokens", lambda: NUM_DRAFT_TOKENS
    )
    monkeypatch.setattr(allocation_sizing, "get_alloc_page_size", lambda: 1)


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("context_len", [64, 512])
def test_no_request_can_reach_past_its_row(context_len):
    """Red if the row SGLang makes is narrower than what PARSE or the scheduler may
    write: the writer runs on into the next request's row."""
    from sglang.srt.mem_cache.allocation_sizing import (
        get_alloc_reserve_per_decode,
        get_req_to_token_extra_context_len,
    )

    width = context_len + get_req_to_token_extra_context_len()
    for seq_len in range(1, context_len):
        for suffix_len in (0, 19):
            window = draft_window(
                0,
                num_remaining=10 * context_len,
                num_positions=context_len - seq_len - 1 - suffix_len,
            )
            assert seq_len + 1 + window <= width
        # The scheduler reserves behind what is committed, whatever PARSE did.
        assert seq_len + get_alloc_reserve_per_decode() <= width


def test_row_that_is_too_short_is_noticed():
    """Red if a wrong length is written into the next request's row instead."""
    pool = SimpleNamespace(req_to_token=torch.zeros(3, 16, dtype=torch.int32))
    slots = RoundSlots(pool, None, 2048)
    req = SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=10))
    with pytest.raises(AssertionError):
        slots.extend_rows(SimpleNamespace(reqs=[req]), [17])
