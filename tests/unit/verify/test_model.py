"""The target's decode steps in a row, without a model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.requests.state import RequestState
from sglang_parse.verify import drawing, model
from sglang_parse.verify.model import TargetModel

VOCAB = 50


class Verifier:
    """A target that counts: behind token t it writes t + 1."""

    runner = None

    def __init__(self) -> None:
        self.asked: list[dict] = []

    def decode(self, *, input_ids, **more):
        self.asked.append({"ids": input_ids.tolist(), **more})
        logits = torch.nn.functional.one_hot(input_ids + 1, VOCAB)
        return SimpleNamespace(logits=logits)


@pytest.fixture
def places(monkeypatch) -> list[list[int]]:
    """Sampling without SGLang: the places that were sampled, step by step."""
    places: list[list[int]] = []

    def sample_rows(runner, logits, *, positions, **_):
        places.append(positions.tolist())
        return logits.argmax(-1), len(places)

    monkeypatch.setattr(drawing, "sample_rows", sample_rows)
    monkeypatch.setattr(drawing, "expand_rows", lambda *_: None)
    monkeypatch.setattr(drawing, "token_needs", lambda batch, owner: None)
    monkeypatch.setattr(model, "join_outputs", list)
    return places


def new_state() -> RequestState:
    return RequestState(None, frozenset(), None, None)


STATES = [new_state(), new_state()]
PLACES = [(STATES[0], 5, 7), (STATES[1], 9, 20)]


def make_round(num_steps: int, places=PLACES, **more) -> Round:
    """places: of each request its state, tokens with KV, and its last token."""
    req = SimpleNamespace(multimodal_inputs=None)
    requests = [
        RequestRound(req=req, state=s, row=k, seq_len=n, bonus_token=t, output_len=1)
        for k, (s, n, t) in enumerate(places)
    ]
    batch = SimpleNamespace(
        reqs=[req] * len(places), req_pool_indices=torch.arange(len(places)),
        seq_lens=torch.zeros(len(places)),
        sampling_info=SimpleNamespace(sampling_mask_batch_indices=None),
        return_hidden_states=False, return_logprob=False,
    )  # fmt: skip
    return Round(batch, requests, num_steps=num_steps, head_rests=True, **more)


def test_each_step_goes_on_from_what_the_last_one_sampled(monkeypatch, places):
    """Red if a later step gets another token, place or length than a round of its own
    would have, whatever the machine's speed."""
    expanded = []
    monkeypatch.setattr(drawing, "expand_rows", lambda *_: expanded.append(1))
    round, verifier = make_round(3), Verifier()
    target = TargetModel(verifier, SimpleNamespace(table=None))
    steps = target.decode(round, lambda steps, num: True)
    assert steps == [[8, 21], [9, 22], [10, 23]]
    assert [one["ids"] for one in verifier.asked] == [[7, 20], [8, 21], [9, 22]]
    lens = [[5, 9], [6, 10], [7, 11]]
    for name in ("seq_lens", "seq_lens_cpu"):
        assert [one[name].tolist() for one in verifier.asked] == lens
    assert places == lens and round.sampled == [1, 2, 3]
    assert not any(one["is_followed"] for one in verifier.asked)
    assert len(expanded) == 1  # the requests are the same in every step


def test_steps_end_where_they_no_longer_pay(places):
    """Red if a step is taken that nobody wants, or is decided on without the tokens of
    the last one, which are known on CPU."""
    round, verifier, asked = make_round(8), Verifier(), []
    target = TargetModel(verifier, SimpleNamespace(table=None))

    def go_on(steps, num):
        asked.append([list(step) for step in steps])
        return num < 2

    assert target.decode(round, go_on) == [[8, 21], [9, 22]]
    assert asked == [[[8, 21]], [[8, 21], [9, 22]]]
    assert len(verifier.asked) == len(places) == 2


MASKS = SimpleNamespace(sampling_mask_batch_indices=[0])


def always(steps, num) -> bool:
    return True


def decode(target: TargetModel, round: Round, go_on=always) -> list[list[int]]:
    target.look_ahead(round)
    return target.decode(round, go_on)


@pytest.fixture
def ahead(places):
    """A target whose device works beside the host, behind a round of two steps that
    goes on: its next step, the third, runs already."""
    verifier = Verifier()
    target = TargetModel(verifier, SimpleNamespace(table=None), runs_ahead=True)
    assert decode(target, make_round(2, goes_on=True)) == [[8, 21], [9, 22]]
    assert [one["ids"] for one in verifier.asked] == [[7, 20], [8, 21], [9, 22]]
    verifier.asked.clear()
    places.clear()
    return target


def test_a_step_that_runs_ahead_is_the_next_rounds_first(ahead, places):
    """Red if a token is computed twice or lost, or stands at another place, where a
    step runs beside the scheduler's work."""
    asked = ahead.verifier.asked
    round = make_round(3, [(STATES[0], 7, 9), (STATES[1], 11, 22)], goes_on=True)
    seen = []
    go_on = lambda steps, num: seen.append((len(steps), num)) or True  # noqa: E731
    assert decode(ahead, round, go_on) == [[10, 23], [11, 24], [12, 25]]
    assert [one["ids"] for one in asked] == [[10, 23], [11, 24], [12, 25]]
    assert places == [[8, 12], [9, 13], [10, 14]] and len(round.sampled) == 3
    assert seen == [(1, 1), (2, 2), (3, 3)]
    # A round of one step has it already, and only starts the next one.
    asked.clear()
    round = make_round(1, [(STATES[0], 10, 12), (STATES[1], 14, 25)], goes_on=True)
    assert decode(ahead, round) == [[13, 26]]
    assert [one["ids"] for one in asked] == [[13, 26]]


@pytest.mark.parametrize("is_done", [True, False])
def test_a_round_says_whether_it_came_late(ahead, is_done):
    """Red if nobody learns that the device waited between two rounds, or that it did
    not."""
    end = SimpleNamespace(query=lambda: is_done)
    ahead.steps._ahead = replace(ahead.steps._ahead, end=end)
    round = make_round(1, [(STATES[0], 7, 9), (STATES[1], 11, 22)])
    decode(ahead, round)
    assert round.took_ahead and round.is_late == is_done
    other = make_round(1, [(STATES[0], 8, 10), (STATES[1], 12, 23)])
    decode(ahead, other)
    assert not (other.took_ahead or other.is_late)


def test_those_who_are_left_go_on_from_their_own_rows(ahead):
    """Red if a request gets the token of one that has ended beside it."""
    round = make_round(2, [(STATES[1], 11, 22)])
    assert decode(ahead, round) == [[23], [24]]
    assert [one["ids"] for one in ahead.verifier.asked] == [[23]]


def test_others_join_behind_the_step_that_runs_already(ahead, places):
    """Red if a step is lost whenever a request begins, if one gets another's token or
    place, or if a round ends before everybody has a token."""
    begins = [(new_state(), 4, 30), (STATES[1], 11, 22), (STATES[0], 6, 9)]
    round = make_round(1, begins, goes_on=True)
    go_on = lambda steps, num: num > 1  # noqa: E731
    assert decode(ahead, round, go_on) == [[30, 23, 9], [31, 24, 10]]
    assert [r.num_skipped for r in round] == [1, 0, 1]
    assert [one["ids"] for one in ahead.verifier.asked] == [[30, 23, 9], [31, 24, 10]]
    lens = [[4, 12, 6], [5, 13, 7]]
    for name in ("seq_lens", "seq_lens_cpu"):
        assert [one[name].tolist() for one in ahead.verifier.asked] == lens
    assert places == lens
    # All of them go on from there.
    ahead.verifier.asked.clear()
    begins = [(begins[0][0], 5, 31), (STATES[1], 13, 24), (STATES[0], 7, 10)]
    round = make_round(1, begins)
    assert decode(ahead, round) == [[32, 25, 11]]
    assert not ahead.verifier.asked and not any(r.num_skipped for r in round)


@pytest.mark.parametrize(
    "begins",
    [
        [(STATES[0], 7, 9), (STATES[1], 11, 22), (new_state(), 4, 3)],
        [(STATES[0], 6, 9), (STATES[1], 10, 22)],
        [(new_state(), 7, 9), (new_state(), 11, 22)],
    ],
    ids=["another request", "another length", "a new beginning"],
)
def test_a_step_that_is_nobodys_next_is_left_aside(ahead, begins):
    """Red if a request is given a token that the target wrote at another place, or if
    rounds that are not followed by others have steps that some do not take part in."""
    first = [token for _, _, token in begins]
    assert decode(ahead, make_round(1, begins)) == [[t + 1 for t in first]]
    assert [one["ids"] for one in ahead.verifier.asked] == [first]


def test_a_pass_leaves_a_step_ahead_aside(ahead):
    """Red if a plain round behind a pass takes a step from before it."""
    ahead.slots.take_scratch = ahead.slots.release_scratch = lambda *_: None
    ahead.verifier.verify = lambda plan, **_: None
    judged = make_round(1)
    judged.batch.tree_cache = None
    ahead.verify(judged, SimpleNamespace(num_suffix_tokens=0))
    decode(ahead, make_round(1, [(STATES[0], 7, 9), (STATES[1], 11, 22)]))
    assert [one["ids"] for one in ahead.verifier.asked] == [[9, 22]]


@pytest.mark.parametrize(
    ("on_device", "more", "asked"),
    [
        (False, {"goes_on": True}, {}),
        (True, {}, {}),
        (True, {"goes_on": True, "has_state": True}, {}),
        (True, {"goes_on": True}, {"return_logprob": True}),
        (True, {"goes_on": True}, {"return_hidden_states": True}),
        (True, {"goes_on": True}, {"sampling_info": MASKS}),
    ],
    ids=["CPU", "drafts are due", "a state", "logprobs", "hidden states", "masks"],
)
def test_no_step_runs_ahead_that_may_be_lost(places, on_device, more, asked):
    """Red if a step is computed that no round will take, or a state reads a token that
    the answer may not have."""
    target = TargetModel(Verifier(), SimpleNamespace(table=None), runs_ahead=on_device)
    round = make_round(2, **more)
    vars(round.batch).update(asked)
    assert len(target.decode(round, always)) == len(target.verifier.asked) == 2


def test_nobody_runs_ahead_of_an_end(places):
    """Red if a step runs ahead where somebody is asked and says no: an answer ends."""
    target = TargetModel(Verifier(), SimpleNamespace(table=None), runs_ahead=True)
    assert len(target.decode(make_round(2, goes_on=True), lambda _, n: n < 2)) == 2
    assert len(target.verifier.asked) == 2
