"""Passes without verdicts as decode steps: what is forwarded, and which passes fit."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

from sglang_parse.requests.round_records import RequestRound, Round
from sglang_parse.sgl.fast_paths import FastPaths
from sglang_parse.verify import short_passes as module
from sglang_parse.verify.layout import PassRequest, build_verify_plan
from sglang_parse.verify.short_passes import ShortPasses

NULL, FULL = CaptureHiddenMode.NULL, CaptureHiddenMode.FULL
TOKEN_BYTES = 1 << 20


def short_passes(
    *, max_bs: int | None = 16, sizes=(), shows=False, mode=NULL
) -> ShortPasses:
    """max_bs: rows of the largest captured step, None where none is captured. sizes: of
    captured steps, where one takes no fewer rows than it has."""
    graphs = SimpleNamespace(capture_hidden_mode=mode)
    if max_bs is not None:
        graphs.max_bs, graphs.capture_bs = max_bs, list(sizes)
        graphs.disable_padding = bool(sizes)
    pool = SimpleNamespace(
        size=99, page_size=1, get_kv_size_bytes=lambda: 100 * TOKEN_BYTES
    )
    runner = SimpleNamespace(decode_cuda_graph_runner=graphs, token_to_kv_pool=pool)
    verifier = SimpleNamespace(
        runner=runner,
        shows_features=shows,
        decode=lambda **fields: fields,
        paths=FastPaths(),
    )
    return ShortPasses(verifier, SimpleNamespace(table=torch.zeros(8, 32)))


def round_of(plan, *, shifts=(), hidden=False, **more) -> Round:
    images = [SimpleNamespace(mrope_position_delta=d) for d in shifts]
    images += [None] * (len(plan.seq_lens) - len(images))
    reqs = [SimpleNamespace(multimodal_inputs=one) for one in images]
    batch = SimpleNamespace(
        reqs=reqs,
        req_pool_indices=torch.arange(3, 3 + len(reqs)),
        return_hidden_states=hidden,
    )
    requests = [RequestRound(req, None, 0, 5, 0, output_len=1) for req in reqs]
    return Round(batch, requests, **more)


def plan_of(*drafts, seq_lens=(5, 9, 20), boundaries=()):
    return build_verify_plan(
        [
            PassRequest(
                seq_len=seq_len,
                bonus_token=10 * k,
                draft_tokens=[10 * k + 1 + j for j in range(num)],
                boundaries=boundaries,
                suffix=(1, 2) if boundaries else (),
            )
            for k, (seq_len, num) in enumerate(zip(seq_lens, drafts, strict=False))
        ]
    )


def test_each_token_of_a_draft_is_a_row_that_reads_up_to_its_own_place():
    """Red if a row stands elsewhere than the pass's, in another request's row, or reads
    more or less than its own prefix."""
    plan = plan_of(2, 0, 3)
    found = short_passes().run(round_of(plan, shifts=(0, 0, 7)), plan)
    assert found["input_ids"].tolist() == [0, 1, 2, 10, 20, 21, 22, 23]
    assert found["req_pool_indices"].tolist() == [3, 3, 3, 4, 5, 5, 5, 5]
    places = [5, 6, 7, 9, 20, 21, 22, 23]
    assert found["seq_lens"].tolist() == found["seq_lens_cpu"].tolist() == places
    assert found["mrope_shifts"] == [0] * 4 + [7] * 4
    assert list(plan.root_rows) == [0, 3, 4]
    assert found["is_followed"] and not found["return_hidden_states"]
    resting = short_passes().run(round_of(plan, head_rests=True), plan)
    assert not resting["is_followed"]


@pytest.mark.parametrize(
    ("passes", "fits"),
    [
        ({}, True),
        ({"max_bs": 8}, True),
        ({"max_bs": 7}, False),
        ({"max_bs": None}, False),
        ({"sizes": (4, 8, 16)}, True),
        ({"sizes": (4, 16)}, False),
        ({"shows": True, "mode": FULL}, True),
        ({"shows": True, "mode": NULL}, False),
    ],
)
def test_what_is_captured_decides(passes, fits):
    """Red if a pass is longer than what is captured, runs as a step without a graph, or
    takes the hidden states from a head that reads them."""
    plan = plan_of(2, 0, 3)
    assert short_passes(**passes).fits(round_of(plan), plan) == fits


def test_a_head_that_rests_needs_no_hidden_states():
    """Red if a head that reads nothing keeps passes long."""
    plan, passes = plan_of(2), short_passes(shows=True)
    assert not passes.fits(round_of(plan), plan)
    assert passes.fits(round_of(plan, head_rests=True), plan)


@pytest.mark.parametrize(
    ("plan", "round"),
    [
        ({"boundaries": (2,)}, {}),
        ({}, {"hidden": True}),
    ],
)
def test_what_a_chain_of_steps_cannot_show_is_a_pass(plan, round):
    """Red if verdicts or a request's hidden states get lost in decode steps."""
    made = plan_of(2, **plan)
    assert not short_passes().fits(round_of(made, **round), made)


def test_long_contexts_are_read_once(monkeypatch):
    """Red if each row of a pass reads a context that takes longer than is saved."""
    monkeypatch.setattr(module, "MOST_READ", 20 * TOKEN_BYTES)
    for seq_len, fits in ((10, True), (11, False)):
        plan = plan_of(2, seq_lens=(seq_len,))
        assert short_passes().fits(round_of(plan), plan) == fits
