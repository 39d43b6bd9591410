"""KV rows of a draft's own: columns have the KV of their tokens, no slot is lost."""

from __future__ import annotations

import random

from tests.support.own_rows import CheckedRows


def forward(rows: CheckedRows, row, ids) -> None:
    rows.check(row.index, row.num_cached, ids)
    rows.write(row.index, row.num_cached, ids[row.num_cached :])
    row.num_cached = len(ids)


def test_a_prefix_is_computed_once():
    """Red if each request reads a shared system prompt anew, or reads another's."""
    rows = CheckedRows(100)
    first = rows.open([1, 2, 3, 4])
    assert rows.fit(first, wanted=6, busy=())
    forward(rows, first, [1, 2, 3, 4])
    rows.share(first, [1, 2, 3])
    second = rows.open([1, 2, 3, 9])
    assert (first.num_shared, second.num_cached) == (3, 3)
    assert rows.fit(second, wanted=8, busy=())
    forward(rows, second, [1, 2, 3, 9, 9])
    rows.check(first.index, 4, [1, 2, 3, 4])
    rows.close(first, [1, 2, 3, 4])
    rows.close(second, [1, 2, 3, 9, 9])
    rows.check_whole()
    # All but the last token, which has to be read for what follows it.
    assert rows.open([1, 2, 3, 9]).num_cached == 3
    assert rows.open([1, 2, 3, 9, 9, 9]).num_cached == 5


def test_random_requests_keep_their_kv_and_leave_no_slot_behind():
    """Red if a slot is freed twice or never, or a column has another token's KV."""
    rng = random.Random(5)
    for size, width in ((60, 4096), (400, 4096), (120, 22)):
        rows = CheckedRows(size, width=width)
        live: dict = {}
        num_full = 0
        for _ in range(1500):
            if len(live) < 4 and rng.random() < 0.3:
                ids = [rng.randint(1, 2) for _ in range(rng.randint(1, 8))]
                row = rows.open(ids)
                assert row is not None
                live[row] = ids
            elif live:
                row = rng.choice(list(live))
                ids = live[row]
                kept = rng.randint(0, len(ids)) if rng.random() < 0.4 else len(ids)
                ids = ids[:kept] + [rng.randint(1, 2) for _ in range(rng.randint(1, 9))]
                live[row] = ids
                wanted = len(ids) + rng.randint(0, 6)
                rows.keep(row, min(kept, len(ids) - 1))
                if rows.fit(row, wanted=wanted, busy={row}):
                    forward(rows, row, ids)
                    if rng.random() < 0.3:
                        rows.share(row, ids[: rng.randint(0, len(ids))])
                else:
                    num_full += 1
                if rng.random() < 0.2 or row.num_cached > width // 2:
                    rows.close(row, ids)
                    del live[row]
            rows.check_whole()
        for row, ids in live.items():
            rows.close(row, ids)
        rows.check_whole()
        assert rows.allocator.available_size() + rows.tree.evictable_size() == size
        assert (num_full > 0) == (size == 60 or width == 22)


def test_there_are_as_many_rows_as_requests():
    """Red if a request without a row stops the server."""
    rows = CheckedRows(20, num_rows=1)
    row = rows.open([1, 2])
    assert rows.open([1, 2]) is None
    rows.close(row, [1, 2])
    assert rows.open([1, 2]) is not None
