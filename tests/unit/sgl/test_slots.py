"""Rows of `req_to_token`: what PARSE writes into them, against their width, and the
slots that it takes and frees, against a pool that is cut into pages."""

import random
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.plugin.algorithm import NUM_DRAFT_TOKENS
from sglang_parse.requests.limits import draft_window
from sglang_parse.sgl.slots import RoundSlots

pytestmark = pytest.mark.usefixtures("plugins")


@pytest.fixture
def page_size(request):
    return getattr(request, "param", 1)


@pytest.fixture
def published(monkeypatch, page_size):
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
    monkeypatch.setattr(allocation_sizing, "get_alloc_page_size", lambda: page_size)


def whole_pages(num, page_size):
    return -(-num // page_size) * page_size


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("context_len", [64, 512])
@pytest.mark.parametrize("page_size", [1, 16, 48], indirect=True)
def test_no_request_can_reach_past_its_row(context_len, page_size):
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
            assert whole_pages(seq_len + 1 + window, page_size) <= width
        # The scheduler reserves behind what is committed, whatever PARSE did.
        reserved = seq_len + get_alloc_reserve_per_decode()
        assert whole_pages(reserved, page_size) <= width


def test_row_that_is_too_short_is_noticed():
    """Red if a wrong length is written into the next request's row instead."""
    pool = SimpleNamespace(req_to_token=torch.zeros(3, 16, dtype=torch.int32))
    slots = RoundSlots(pool, SimpleNamespace(page_size=1), 2048)
    req = SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=10))
    with pytest.raises(AssertionError):
        slots.extend_rows(SimpleNamespace(reqs=[req]), [17])


class Paged:
    """RoundSlots over SGLang's own allocator in pages, with requests that hold rows."""

    def __init__(self, page_size: int, num_pages: int, prompts: list[int]) -> None:
        from sglang.srt.mem_cache.allocator.paged import PagedTokenToKVPoolAllocator
        from sglang.srt.mem_cache.cache_init_params import CacheInitParams
        from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
        from sglang.srt.mem_cache.radix_cache import RadixCache

        size = page_size * num_pages
        self.allocator = PagedTokenToKVPoolAllocator(
            size, page_size, torch.float32, "cpu", None, need_sort=False
        )
        pool = ReqToTokenPool(len(prompts), size, "cpu", False)
        cache = CacheInitParams(
            disable=False,
            req_to_token_pool=pool,
            token_to_kv_pool_allocator=self.allocator,
            page_size=page_size,
        )
        self.slots = RoundSlots(pool, self.allocator, max_rows=size)
        self.tree = RadixCache(cache)
        self.batch = SimpleNamespace(
            reqs=[
                SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=n)) for n in prompts
            ],
            req_pool_indices_cpu=torch.tensor(pool.alloc_rows(len(prompts))),
            tree_cache=self.tree,
            device="cpu",
        )
        self.batch.req_pool_indices = self.batch.req_pool_indices_cpu
        for row, num in zip(self.rows, prompts, strict=True):
            taken = self.allocator.alloc(whole_pages(num, page_size))
            self.slots.table[row, :num] = taken[:num].int()

    @property
    def rows(self) -> list[int]:
        return self.batch.req_pool_indices_cpu.tolist()

    @property
    def held(self) -> list[int]:
        return [r.kv.kv_allocated_len for r in self.batch.reqs]

    def check(self, scratch: torch.Tensor) -> None:
        """Each page is free, or of one row, in order, or of the scratch slots."""
        size = self.allocator.page_size
        pages = self.allocator.free_pages.tolist()
        for row, num in zip(self.rows, self.held, strict=True):
            own = self.slots.table[row, :num].tolist()
            first = own[::size]
            assert own == [p + k for p in first for k in range(size)][:num]
            pages += [p // size for p in first]
        assert len(set(scratch.tolist())) == len(scratch)
        pages += {s // size for s in scratch.tolist()}
        assert sorted(pages) == list(range(1, self.allocator.num_pages + 1))
        assert max(pages) * size + size - 1 == self.slots.last_slot


@pytest.mark.usefixtures("published")
@pytest.mark.parametrize("page_size", [2, 16], indirect=True)
@pytest.mark.parametrize("seed", range(4))
def test_no_page_is_lost_or_given_twice(page_size, seed):
    """Red if a row's half-filled page goes to another, if scratch slots share a page
    with a row, or if a page that is still read is freed."""
    rng = random.Random(seed)
    pool = Paged(page_size, 60, [rng.randint(1, 3 * page_size) for _ in range(3)])
    pool.check(torch.empty(0))
    for _ in range(40):
        ends = [n + rng.randint(0, 2 * page_size) for n in pool.held]
        missing = sum(e - n for e, n in zip(ends, pool.held, strict=True))
        if missing <= pool.slots.num_free(pool.tree, len(ends)):
            pool.slots.extend_rows(pool.batch, ends)
            assert all(h >= e for h, e in zip(pool.held, ends, strict=True))
        num = rng.randint(0, pool.slots.num_free(pool.tree))
        scratch = pool.slots.take_scratch(pool.tree, num)
        assert len(scratch) == num
        pool.check(scratch)
        pool.slots.release_scratch(scratch)
        had, kept = pool.held, [rng.randint(1, n) for n in pool.held]
        pool.slots.trim_rows(pool.batch, kept)
        # A step that runs ahead writes the next column.
        least = [min(h, k + 1) for h, k in zip(had, kept, strict=True)]
        assert all(h >= k for h, k in zip(pool.held, least, strict=True))
        pool.check(torch.empty(0))


@pytest.mark.parametrize("page_size", [1, 16])
def test_what_fits_by_count_can_be_taken(page_size):
    """Red if rows that each leave most of a page unused run the pool dry: SGLang stops
    the scheduler then."""
    for extra in range(1, 2 * page_size + 2):
        pool = Paged(page_size, 12, [1, 1, 1])
        if 3 * extra > pool.slots.num_free(pool.tree, 3):
            continue
        pool.slots.extend_rows(pool.batch, [1 + extra] * 3)
        left = pool.slots.num_free(pool.tree)
        assert len(pool.slots.take_scratch(pool.tree, left)) == left
