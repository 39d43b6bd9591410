"""KV slots, rows and budgets."""

import inspect

import pytest

from tests.support.signatures import parameters

pytestmark = pytest.mark.usefixtures("plugins")


@pytest.mark.contract_source
def test_kv_record_has_lengths():
    """Red if the allocated length of a request moves (sgl/slots.py writes it)."""
    from sglang.srt.managers import schedule_batch

    source = inspect.getsource(schedule_batch)
    assert "kv_allocated_len: int = 0" in source
    assert "kv_committed_len: int = 0" in source


@pytest.mark.contract_source
def test_allocation_functions_take_our_arguments():
    """Red if KV slots are taken or written by another signature."""
    from sglang.srt.mem_cache import allocation, allocation_sizing

    assert parameters(allocation.alloc_token_slots)[:2] == ["tree_cache", "num_tokens"]
    writer = inspect.unwrap(allocation.assign_req_to_token_pool_func)
    assert len(parameters(writer)) in (2, 6)  # (*args, **kwargs) once hooked
    assert parameters(allocation_sizing.get_alloc_reserve_per_decode) == []


@pytest.mark.contract_source
def test_row_is_wide_enough_for_the_scheduler_reserve():
    """Red if SGLang's own reserve can run into the next request's row (TRAP 3).

    Row width is the context length + 4 + draft width, the reserve twice the width.
    """
    from sglang.srt.mem_cache import allocation_sizing

    from sglang_parse.plugin.algorithm import NUM_DRAFT_TOKENS

    reserve = inspect.getsource(allocation_sizing.get_alloc_reserve_per_decode)
    assert "return 2 * get_alloc_len_per_decode()" in reserve
    width = inspect.getsource(allocation_sizing.get_req_to_token_extra_context_len)
    assert "4 + (max_speculative_num_draft_tokens() or 0)" in width
    assert 2 * NUM_DRAFT_TOKENS <= 4 + NUM_DRAFT_TOKENS


@pytest.mark.contract_source
def test_pool_configurator_asks_us_for_the_draft_bytes():
    """Red if the cell size is computed elsewhere: the draft pool is unbudgeted then."""
    from sglang.srt.model_executor.pool_configurator import DefaultPoolConfigurator

    source = inspect.getsource(DefaultPoolConfigurator)
    assert "self._compute_cell_size(" in source


def test_kv_pool_seam_of_the_cpu_platform():
    """Red if the Triton warm-up is not the method that our pool leaves out."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    assert "_init_kv_copy_and_warmup" in vars(MHATokenToKVPool)


@pytest.mark.contract_source
def test_routed_experts_have_rows_for_a_prefill():
    """Red if the buffer is no longer sized by a prefill (capacity.longest_pass): a
    longer pass would stop the scheduler."""
    from sglang.srt.state_capturer.routed_experts import RoutedExpertsCapturer

    source = inspect.getsource(RoutedExpertsCapturer)
    assert "max_batch_size = max(" in source
    assert "get_schedule().chunked_prefill_size" in source
