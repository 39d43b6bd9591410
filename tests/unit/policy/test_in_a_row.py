"""When a round may follow another one without the scheduler."""

from types import SimpleNamespace

import pytest

from sglang_parse.judging.decide import Decision
from sglang_parse.policy.in_a_row import has_room, has_time, may_go_on
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.round_records import Kept, RequestRound, Round
from tests.support.fake_engine import STOP, make_request


def make_round(tokens=(5, 6), *, max_new_tokens=100, stops=(), error=None, **more):
    req = make_request("exact", max_new_tokens=max_new_tokens)
    req.sampling_params.stop_strs = list(stops)
    r = RequestRound(req, req.state, 0, 2, 12, output_len=1, draft=Draft((5,)))
    r.error, r.window = error, 3
    r.kept = Kept(decision=Decision(tuple(tokens), 0, 0, ()))
    other = make_request("exact")
    s = RequestRound(other, other.state, 1, 2, 12, output_len=1)
    s.kept = Kept(decision=Decision((9,), 0, 0, ()))
    batch = SimpleNamespace(tree_cache=None)
    return Round(batch, [s, r], **{"may_repeat": True, **more})


def test_nothing_is_to_be_done_behind_a_round():
    assert may_go_on(make_round())


@pytest.mark.parametrize(
    "more",
    [
        {"tokens": (5, STOP)},
        {"tokens": (5, STOP, 6)},
        {"max_new_tokens": 3},  # one of them was written before
        {"max_new_tokens": 2},
        {"stops": ["x"]},
        {"error": KeyError("x")},
        {"num_waiting": 1},
        {"may_repeat": False},
        {"has_state": True},
    ],
)
def test_the_scheduler_has_something_to_do(more):
    """Red if an answer is written on behind its end, a grammar or a recurrent state is
    left behind, or somebody waits for longer than for one round."""
    assert not may_go_on(make_round(**more))


def test_decode_steps_follow_each_other_by_themselves():
    """Red if rounds in a row take the place of decode steps in a row."""
    round = make_round()
    for r in round:
        r.draft = Draft()
    assert not may_go_on(round)


def test_the_pool_has_room_for_another_round():
    """Red if a round in a row finds no slot, which the scheduler would have made."""
    round = make_round()
    wanted = sum(r.num_columns for r in round)
    assert wanted == 5 + 2
    assert has_room(round, 2 * wanted) and not has_room(round, 2 * wanted - 1)


def test_a_row_is_as_long_as_a_stream_may_wait():
    assert has_time(0.05, 0.05) and not has_time(0.06, 0.05)
