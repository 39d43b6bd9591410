"""How many tokens the target writes before the scheduler is asked again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_parse.policy.planner import (
    MOST_MS,
    MOST_STEPS,
    STOP_STEPS,
    pays,
    plain_steps,
)
from sglang_parse.requests.round_records import RequestRound, Round

CONTEXT = 1000


def off_round(*, left: int = 100, seq_len: int = 10, stops=(), **more) -> Round:
    """Two requests; the second may write `left` tokens and has `seq_len` behind it."""
    requests = [
        RequestRound(
            SimpleNamespace(
                sampling_params=SimpleNamespace(
                    max_new_tokens=5 + num, stop_strs=stops, stop_regex_strs=None
                )
            ),
            state=None, row=row, seq_len=length, bonus_token=1, output_len=5,
        )
        for row, (num, length) in enumerate([(100, 10), (left, seq_len)])
    ]  # fmt: skip
    return Round(SimpleNamespace(), requests, **{"may_repeat": True} | more)


@pytest.mark.parametrize(
    ("step_ms", "round", "num"),
    [
        (5.0, off_round(), MOST_STEPS),
        (MOST_MS / 2, off_round(), 2),
        (33.0, off_round(), 6),  # a slow machine (decision 5)
        (MOST_MS + 1, off_round(), 1),  # long steps hide what is between them
        (5.0, off_round(may_repeat=False), 1),
        (5.0, off_round(left=12), MOST_STEPS),  # four rows of 32 are for nothing
        (5.0, off_round(left=3), 4),
        (5.0, off_round(left=2), 2),
        (5.0, off_round(left=0), 1),
        (5.0, off_round(seq_len=CONTEXT - 3), 2),
        (5.0, off_round(stops=("\n\n",)), STOP_STEPS),  # it is found behind the round
    ],
)
def test_several_short_steps_where_nobody_waits(step_ms, round, num):
    """Red if a new request or a stream waits long, or an answer or the context is
    written over its end."""
    assert plain_steps(round, step_ms=step_ms, context_len=CONTEXT) == num


@pytest.mark.parametrize(
    ("lens", "num", "expected"),
    [
        ([100], 8, True),
        ([3], 3, True),
        ([3], 4, False),  # a round of one ends with its answer
        ([1] + [100] * 15, 2, True),  # one row of 32 is for nothing
        ([1] + [100] * 15, 8, True),
        ([1] * 3 + [100] * 13, 3, True),
        ([1] * 3 + [100] * 13, 4, False),
    ],
)
def test_many_go_on_though_a_few_have_ended(lens, num, expected):
    """Red if one end of many ends a round, or if a round goes on for a few."""
    assert pays(lens, num) is expected
