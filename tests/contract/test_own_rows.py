"""What rows of a draft's own need of SGLang's pools and radix cache."""

import inspect
from array import array

import pytest
import torch

from tests.support.own_rows import CheckedRows
from tests.support.signatures import parameters

pytestmark = pytest.mark.usefixtures("plugins")


def key(*ids):
    from sglang.srt.mem_cache.radix_cache import RadixKey

    return RadixKey(array("q", ids), None)


def test_rows_are_taken_and_given_back_by_number():
    """Red if rows of the table are had otherwise, or row 0 is one of them."""
    rows = CheckedRows(10, num_rows=2)
    pool = rows.pool
    taken = pool.alloc_rows(2)
    assert sorted(taken) == [1, 2] and pool.alloc_rows(1) is None
    pool.free_rows([taken[0]])
    assert pool.alloc_rows(1) == [taken[0]]
    assert rows.table.dtype == torch.int32


def test_slots_are_taken_and_given_back():
    """Red if slots have another type, or slot 0 is not kept for padding."""
    allocator = CheckedRows(4).allocator
    slots = allocator.alloc(4)
    assert slots.dtype == torch.int64 and sorted(slots.tolist()) == [1, 2, 3, 4]
    assert allocator.available_size() == 0 and allocator.alloc(1) is None
    allocator.free(slots[:3])
    assert allocator.available_size() == 3


def test_the_radix_cache_shares_prefixes_without_requests():
    """Red if a prefix is matched, locked, inserted or evicted by other calls than ours:
    a match tells its length and node, an insertion how much of it was known, a locked
    node is not evicted."""
    from sglang.srt.mem_cache.base_prefix_cache import (
        EvictParams,
        InsertParams,
        MatchPrefixParams,
    )

    rows = CheckedRows(6)
    tree, slots = rows.tree, rows.allocator.alloc(5)
    assert tree.insert(InsertParams(key=key(1, 2, 3), value=slots[:3])).prefix_len == 0
    again = tree.insert(InsertParams(key=key(1, 2, 9), value=slots[2:]))
    assert again.prefix_len == 2
    found = tree.match_prefix(MatchPrefixParams(key(1, 2, 3, 4)))
    node = found.last_device_node
    assert found.device_prefix_len == 3
    assert tree.path_device_indices(node).tolist() == slots[:3].tolist()
    tree.inc_lock_ref(node)
    tree.evict(EvictParams(num_tokens=6))
    assert (tree.evictable_size(), tree.protected_size()) == (0, 3)
    tree.dec_lock_ref(node)
    tree.evict(EvictParams(num_tokens=6))
    assert tree.evictable_size() + tree.protected_size() == 0


@pytest.mark.contract_source
def test_the_constructors_take_our_arguments():
    """Red if a server with a draft in text stops while it makes its pools."""
    from sglang.srt.mem_cache.cache_init_params import CacheInitParams
    from sglang.srt.mem_cache.memory_pool import ReqToTokenPool

    ours = {"size", "max_context_len", "device", "enable_memory_saver"}
    assert ours <= set(parameters(ReqToTokenPool.__init__))
    ours = {"disable", "req_to_token_pool", "token_to_kv_pool_allocator", "page_size"}
    assert ours <= set(inspect.signature(CacheInitParams).parameters)


def test_marks_of_thinking_are_those_of_sglangs_parsers():
    """Red if SGLang's reasoning parsers know a pair of ours no more."""
    from sglang.srt.parser import reasoning_parser

    from sglang_parse.judging.special_tokens import THINKING_PAIRS

    source = inspect.getsource(reasoning_parser)
    assert all(f'"{text}"' in source for pair in THINKING_PAIRS for text in pair)


def test_chats_are_read_as_sglang_reads_them():
    """Red if SGLang joins the parts of a message otherwise, or takes the last turn of
    an assistant for something else (drafting/draft_prompt.py says the same)."""
    from sglang.srt.entrypoints.openai.serving_chat import OpenAIServingChat
    from sglang.srt.parser.jinja_template_utils import (
        process_content_for_template_format,
    )

    from sglang_parse.drafting.draft_prompt import chat_of

    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    message = {"role": "user", "content": parts}
    read = process_content_for_template_format(message, "string", [], [], [], [])
    ours = chat_of({"messages": [message]})["messages"]
    assert [read["content"]] == [one["content"] for one in ours]
    source = inspect.getsource(OpenAIServingChat._handle_last_assistant_message)
    assert 'messages[-1] = {"role": "user", "content": last_content}' in source
