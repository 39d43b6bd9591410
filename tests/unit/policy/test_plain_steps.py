"""How many tokens the target writes before the scheduler is asked again."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_parse.policy.plain_steps import (
    MOST_MS,
    MOST_STEPS,
    PlainEnds,
    plain_steps,
)
from sglang_parse.requests.round import RequestRound, Round

CONTEXT = 1000


def off_round(*, left: int = 100, seq_len: int = 10, **more) -> Round:
    """Two requests; the second may write `left` tokens and has `seq_len` behind it."""
    requests = [
        RequestRound(
            SimpleNamespace(sampling_params=SimpleNamespace(max_new_tokens=5 + num)),
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
        (33.0, off_round(), 3),  # a slow machine (decision 21)
        (MOST_MS + 1, off_round(), 1),  # long steps hide what is between them
        (0.0, off_round(), 1),  # nothing is known
        (5.0, off_round(num_waiting=1), 1),
        (5.0, off_round(may_repeat=False), 1),
        (5.0, off_round(left=6), MOST_STEPS),  # two rows of sixteen are for nothing
        (5.0, off_round(left=3), 4),
        (5.0, off_round(left=2), 2),
        (5.0, off_round(left=0), 1),
        (5.0, off_round(seq_len=CONTEXT - 3), 2),
    ],
)
def test_several_short_steps_where_nobody_waits(step_ms, round, num):
    """Red if a new request or a stream waits long, or an answer or the context is
    written over its end."""
    assert plain_steps(round, step_ms=step_ms, context_len=CONTEXT) == num


def ending(*stops: set[int], left: int = 100) -> PlainEnds:
    params = SimpleNamespace(sampling_params=SimpleNamespace(max_new_tokens=left))
    return PlainEnds(
        Round(
            SimpleNamespace(),
            [
                RequestRound(
                    params,
                    state=SimpleNamespace(stop_ids=frozenset(one)),
                    row=row, seq_len=9, bonus_token=1, output_len=0,
                )
                for row, one in enumerate(stops)
            ],
        )
    )  # fmt: skip


def test_a_round_of_one_ends_with_its_answer():
    """Red if an answer's last token is overlooked, or another answer's is taken."""
    ends = ending({7})
    assert ends.go_on([[1]], 1) and ends.go_on([[1], [2]], 2)
    assert not ends.go_on([[1], [2], [7]], 3)
    assert ends.lens == [3]
    apart = ending({7}, {8})
    apart.see([[8, 7], [1, 8], [1, 8]])
    assert apart.lens == [100, 2]


def test_many_go_on_though_one_has_ended():
    """Red if one end of many ends a round, or if a round goes on for a few."""
    ends = ending(*[{7}] * 16)
    assert ends.go_on([[7] + [1] * 15], 1)  # one row of 32 is for nothing
    assert ends.go_on([[7] + [1] * 15, [7] * 2 + [1] * 14], 2)
    steps = [[7] + [1] * 15, [7] * 2 + [1] * 14, [1, 1] + [7] * 14]
    assert not ends.go_on(steps, 3)
    assert ends.lens == [1, 2, *[3] * 14]


def test_what_is_not_known_yet_ends_nothing():
    """Red if a device's last step, not read back yet, is taken for an end."""
    ends = ending({7})
    assert ends.go_on([], 1) and ends.go_on([[1]], 2)
    assert not ends.go_on([[1], [7]], 3)
