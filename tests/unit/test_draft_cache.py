"""Draft KV flags per slot."""

import random

import torch

from sglang_parse.draft_cache import DraftCache


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def test_gaps_are_the_runs_without_draft_kv():
    """Red if a run at an end is missed, or a good slot counts as missing."""
    cache = DraftCache(16, "cpu")
    slots = torch.tensor([9, 3, 7, 1, 4, 8])
    assert cache.gaps(slots) == [(0, 6)]
    cache.mark(slots[torch.tensor([1, 2, 4])], num_valid=3)
    assert cache.gaps(slots) == [(0, 1), (3, 4), (5, 6)]
    cache.mark(slots, num_valid=6)
    assert cache.gaps(slots) == cache.gaps(slots[:0]) == []


def test_new_cache_holds_nothing():
    """Red if an unseen slot counts as forwarded: the draft would read garbage."""
    cache = DraftCache(8, "cpu")
    assert cache.num_leading(slots(1, 2, 8)) == 0


def test_leading_stops_at_the_first_hole():
    """Red if holes inside a prefix are skipped over."""
    cache = DraftCache(8, "cpu")
    cache.mark(slots(1, 2, 3), num_valid=3)
    cache.forget(slots(2))
    assert cache.num_leading(slots(1, 2, 3)) == 1
    assert cache.num_leading(slots(1, 3)) == 2
    assert cache.num_leading(slots()) == 0


def test_mark_clears_the_rest_of_the_committed_slots():
    """Red if a re-used slot keeps the flag of the token it held before."""
    cache = DraftCache(8, "cpu")
    cache.mark(slots(4, 5, 6), num_valid=3)
    cache.mark(slots(6, 5, 4), num_valid=1)
    assert cache.num_leading(slots(6)) == 1
    assert cache.num_leading(slots(5)) == cache.num_leading(slots(4)) == 0


def test_prefix_slots_shared_by_two_requests_keep_their_flags():
    """Red if forgetting a new request's own slots touches the cached prefix."""
    cache = DraftCache(8, "cpu")
    cache.mark(slots(1, 2), num_valid=2)
    cache.forget(slots(5, 6))
    assert cache.num_leading(slots(1, 2, 5)) == 2


def test_last_slot_of_the_pool_has_a_flag():
    """Red if slots are counted from 0: SGLang's run from 1 to size (0 is padding)."""
    cache = DraftCache(3, "cpu")
    cache.mark(slots(3), num_valid=1)
    assert cache.num_leading(slots(3)) == 1


def test_random_history_equals_a_set():
    """Red upon any change of what mark and forget do."""
    rng = random.Random(0)
    cache = DraftCache(30, "cpu")
    valid: set[int] = set()
    for _ in range(500):
        chosen = rng.sample(range(31), rng.randint(0, 6))
        if rng.random() < 0.3:
            cache.forget(slots(*chosen))
            valid -= set(chosen)
        else:
            cut = rng.randint(0, len(chosen))
            n = rng.randint(0, cut)
            cache.mark(slots(*chosen[:cut]), num_valid=n)
            valid |= set(chosen[:n])
            valid -= set(chosen[n:cut])
        row = rng.sample(range(31), 8)
        leading = next((i for i, s in enumerate(row) if s not in valid), len(row))
        assert cache.num_leading(slots(*row)) == leading
