"""The target's decode steps in a row, without a model."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.requests.state import RequestState
from sglang_parse.sgl.fast_paths import (
    SHORT_PASSES,
    FastPaths,
    PassFailed,
    PassLacksMemory,
)
from sglang_parse.verify import drawing, model
from sglang_parse.verify.layout import PassRequest, build_verify_plan
from sglang_parse.verify.model import TargetModel

VOCAB = 50


class Verifier:
    """A target that counts: behind token t it writes t + 1."""

    runner = None
    paths = FastPaths()

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
        sampling_info=SimpleNamespace(),
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


class StepsAlone(Verifier):
    """A target whose passes are decode rows and nothing else."""

    steps_alone, can_pass = True, True

    def __init__(self, error: Exception | None) -> None:
        super().__init__()
        self.error, self.paths = error, FastPaths()

    def decode(self, **more):
        if self.error is not None:
            raise self.error
        return super().decode(**more)


@pytest.mark.parametrize(
    ("error", "raised", "is_off"),
    [
        (None, None, False),
        (RuntimeError("no kernel"), PassFailed, True),
        (torch.OutOfMemoryError("full"), PassLacksMemory, False),
    ],
)
def test_a_pass_that_can_be_steps_alone_is(error, raised, is_off):
    """Red if such a pass asks for a verify route, or ends drafts for good where memory
    ran out for once."""
    verifier = StepsAlone(error)
    target = TargetModel(verifier, SimpleNamespace(table=torch.zeros(2, 32)))
    plan = build_verify_plan([PassRequest(n, t, [8, 9], (), ()) for _, n, t in PLACES])
    if raised is None:
        target.verify(make_round(1), plan)
        assert verifier.asked[0]["ids"] == [7, 8, 9, 20, 8, 9]
    else:
        with pytest.raises(PassFailed) as found:
            target.verify(make_round(1), plan)
        assert found.type is raised
    assert verifier.paths.is_off(SHORT_PASSES) == is_off


def test_no_step_is_tried_where_a_pass_was_found_to_be_wrong():
    """Red if a server drafts by what the proof at start has switched off."""
    verifier = StepsAlone(None)
    verifier.can_pass = False
    target = TargetModel(verifier, SimpleNamespace(table=torch.zeros(2, 32)))
    plan = build_verify_plan([PassRequest(n, t, [8], (), ()) for _, n, t in PLACES])
    with pytest.raises(PassFailed, match="short_passes is off"):
        target.verify(make_round(1), plan)
    assert not verifier.asked
