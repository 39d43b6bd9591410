"""KV flags of a drafter per slot."""

import random

import pytest
import torch

from sglang_parse.drafting.kv_flags import KvFlags


def slots(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def mark(flags: KvFlags, held: torch.Tensor, *, num_valid: int) -> None:
    """The slots of one row: the first `num_valid` hold the drafter's KV."""
    flags.mark(held[None], [(0, 0, num_valid, len(held))])


def test_gaps_are_the_runs_without_draft_kv():
    """Red if a run at an end is missed, or a good slot counts as missing."""
    flags = KvFlags(16, "cpu")
    slots = torch.tensor([9, 3, 7, 1, 4, 8])
    assert flags.gaps(slots) == [(0, 6)]
    mark(flags, slots[torch.tensor([1, 2, 4])], num_valid=3)
    assert flags.gaps(slots) == [(0, 1), (3, 4), (5, 6)]
    mark(flags, slots, num_valid=6)
    assert flags.gaps(slots) == flags.gaps(slots[:0]) == []


def test_random_history_equals_a_set():
    """Red if a new slot counts as forwarded, a hole in a prefix is skipped, a slot that
    is used again keeps its flag, or the last slot of the pool has none."""
    rng = random.Random(0)
    flags = KvFlags(30, "cpu")
    valid: set[int] = set()
    for _ in range(500):
        chosen = rng.sample(range(31), rng.randint(0, 6))
        if rng.random() < 0.3:
            flags.forget(slots(*chosen))
            valid -= set(chosen)
        else:
            cut = rng.randint(0, len(chosen))
            n = rng.randint(0, cut)
            mark(flags, slots(*chosen[:cut]), num_valid=n)
            valid |= set(chosen[:n])
            valid -= set(chosen[n:cut])
        row = rng.sample(range(31), 8)
        leading = next((i for i, s in enumerate(row) if s not in valid), len(row))
        assert flags.num_leading([slots(*row)] * 2) == [leading] * 2


@pytest.mark.parametrize("seed", range(30))
def test_spans_of_many_rows_equal_a_loop_over_columns(seed):
    """Red if a span sets the flags of another row or column, or of none where it is
    empty."""
    rng = random.Random(seed)
    ids = rng.sample(range(1, 200), 4 * 40)
    table = torch.tensor(ids, dtype=torch.int32).view(4, 40)
    flags, valid = KvFlags(200, "cpu"), set(rng.sample(range(1, 201), 60))
    flags.mark(slots(*sorted(valid))[None], [(0, 0, len(valid), len(valid))])
    for k in range(20):
        spans = []
        for row in rng.sample(range(4), rng.randint(0, 4)):
            start, valid_end, end = sorted(rng.choices(range(41), k=3))
            if k % 3 == 0:  # a plain round
                start = rng.randrange(40)
                valid_end, end = start + rng.randrange(2), start + 1
            spans.append((row, start, valid_end, end))
            for column in range(start, end):
                slot = int(table[row, column])
                valid -= {slot}
                valid |= {slot} if column < valid_end else set()
        flags.mark(table, spans)
        assert {int(s) for s in flags._valid.nonzero()} == valid
