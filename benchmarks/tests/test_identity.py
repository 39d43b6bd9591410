"""Counts of answers whose tokens are not the target's own."""

from benchmarks.identity import compared, total
from sglang_parse.demo.figures import RequestResult


def answer(*ids, **counters):
    return RequestResult("", ids, len(ids), True, 1.0, 0.1, counters or None)


def test_an_answer_with_another_token_is_counted():
    """Red if an answer that differs in one token, or ends early, counts as the same."""
    alone = [answer(1, 2), answer(3), answer(4, 5)]
    ours = [answer(1, 2, judged_segments=3), answer(4), answer(4, judged_segments=1)]
    found = compared(alone, ours)
    assert (found["answers"], found["differing"], found["first_differing"]) == (3, 2, 1)
    assert found["tokens"] == 5 and found["judged_segments"] == 4
    assert "first_differing" not in compared(alone, alone)
    rows = [{"arm": "exact", **found}, {"arm": "exact", **compared(alone, alone)}]
    assert total(rows) == {"exact": (6, 2)}
