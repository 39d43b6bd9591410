"""KV slots, rows and budgets."""

import inspect

import pytest

from tests.support.signatures import parameters

pytestmark = pytest.mark.usefixtures("plugins")


@pytest.mark.contract_source
def test_allocation_functions_take_our_arguments():
    """Red if KV slots are taken or written by another signature."""
    from sglang.srt.mem_cache import allocation, allocation_sizing

    assert parameters(allocation.alloc_token_slots)[:2] == ["tree_cache", "num_tokens"]
    writer = inspect.unwrap(allocation.assign_req_to_token_pool_func)
    assert len(parameters(writer)) in (2, 6)  # (*args, **kwargs) once hooked
    assert parameters(allocation_sizing.get_alloc_reserve_per_decode) == []


def test_kv_pool_seam_of_the_cpu_platform():
    """Red if the Triton warm-up is not the method that our pool leaves out."""
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    assert "_init_kv_copy_and_warmup" in vars(MHATokenToKVPool)
