"""Guesses of what a draft model writes next: the same drafts in fewer steps."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.drafting import draft_model
from sglang_parse.drafting.draft_model import MOST_LEARNT
from sglang_parse.drafting.guessed_steps import chains_of, write_guessed
from sglang_parse.drafting.guesses import LEAST_SHARE, MOST_RUNS, GuessTable
from sglang_parse.drafting.lanes import DraftPhase, DraftRequest, Lane, Lanes
from sglang_parse.sgl.fast_paths import GUESSED_ROWS, OFF
from tests.support.counting import GREEDY
from tests.support.kv_draft import WIDTH, KvDraft, drafts


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch):
    monkeypatch.setattr(draft_model, "draft_rows", lambda *args: GREEDY)
    monkeypatch.setattr(draft_model, "draft_tp_context", lambda layout: nullcontext())
    monkeypatch.setattr(draft_model, "draft_pp_context", nullcontext)


@pytest.mark.parametrize("period", [3, 11, 97])
@pytest.mark.parametrize("most_steps", [3, 1 << 30])
@pytest.mark.parametrize("max_bs", [0, 1, 4, 6])
def test_drafts_with_guesses_are_those_without(period, most_steps, max_bs):
    """Red if a guess that the model does not write is kept, if its KV is, or if a
    request gets another's tokens; and if guesses save no steps where they are right."""
    plain, guessed = KvDraft(period), KvDraft(period)
    if max_bs:
        guessed.runner.decode_cuda_graph_runner = SimpleNamespace(max_bs=max_bs)
    guessed.guesses = GuessTable()
    expected = drafts(plain, most_steps=most_steps)
    assert drafts(guessed, most_steps=most_steps) == expected
    # Again, with a table that has seen all of it.
    before = len(guessed.batches)
    guessed.kv[:] = -1
    assert drafts(guessed, most_steps=most_steps) == expected
    if period == 97 and most_steps > 3 and not max_bs:
        assert guessed.guesses.share > 0.7
        assert len(guessed.batches) - before < 0.5 * before


def test_another_requests_stop_token_is_not_passed():
    """Red if a draft goes on behind a token that ends it and that others have written,
    so that it is guessed."""
    model = KvDraft(97)
    model.guesses = GuessTable()
    for _ in range(3):
        model.guesses.learn([1, 2, 3], [4, 5, 6, 0, 1, 2, 3])
    model.guesses.share = 1.0
    order = DraftRequest(0, [1, 2, 3], 0, 9, frozenset({6}), 0)
    table = torch.arange(WIDTH)[None]
    found = model.propose([order], table=table, sampling_info=None, phase=DraftPhase())
    assert found.tokens == ((4, 5),) and found.ended == (True,)
    assert len(model.batches) == 1 and found.num_forwarded == (5,)


@pytest.mark.parametrize("is_captured", [True, False])
@pytest.mark.parametrize("max_bs", [0, 2, 6, 40])
def test_a_step_has_no_more_rows_than_there_may_be(max_bs, is_captured):
    """Red if guesses make a step larger than any that is captured, or than a backend
    on a GPU can plan without captured steps: guesses would then be off for good."""
    model = KvDraft(97)
    graphs = SimpleNamespace(max_bs=max_bs)
    if is_captured:
        model.runner.decode_cuda_graph_runner = graphs
    elif max_bs:
        model.runner.device = "cuda"
        model.runner.req_to_token_pool = SimpleNamespace(size=max_bs)
    model.guesses = GuessTable()
    for _ in range(3):
        model.guesses.learn([1, 2, 3], [4, 5, 6, 0, 1, 2, 3] * 2)
    lanes = Lanes(
        Lane(DraftRequest(i, [1, 2, 3], 2, 30, frozenset(), i), 1) for i in range(4)
    )
    guess = model.guesses.look_up
    num_guesses = [num for _, _, num in chains_of(model.runner, lanes, guess)]
    most = {0: [8] * 4, 2: [0] * 2, 6: [2, 0, 0, 0], 40: [8] * 4}[max_bs]
    assert num_guesses == most
    assert max_bs in (0, 2) or sum(num_guesses) + len(num_guesses) <= max_bs


def test_no_lane_waits_for_rows_for_ever():
    """Red if a step leaves out lanes of many unread tokens as long as others draft."""
    runner = SimpleNamespace(decode_cuda_graph_runner=SimpleNamespace(max_bs=6))
    orders = [DraftRequest(i, [1] * 9, 0, 30, frozenset(), i) for i in range(4)]
    lanes = Lanes(
        Lane(order, lead) for order, lead in zip(orders, (1, 5, 1, 5), strict=True)
    )
    seen = set()
    for _ in range(3):
        for lane, tokens, num in chains_of(
            runner, lanes, lambda some, _: [[]] * len(some)
        ):
            lane.follow(tokens, [2] * len(tokens), num)
            seen.add(lane)
    assert seen == set(lanes)


@pytest.mark.parametrize(("most_idle", "num_steps"), [(14.0, 11), (1e9, 13)])
def test_a_draft_that_is_complete_does_not_wait_for_others(most_idle, num_steps):
    """Red if a draft whose guesses hold waits for one whose guesses do not, or if
    nobody looks for new requests meanwhile, as no lane gets further than it."""
    model, table = KvDraft(97), torch.arange(2 * WIDTH).reshape(2, -1)
    model.sample = lambda logits, *_: torch.full((len(logits),), 1)
    lanes = Lanes(
        Lane(DraftRequest(i, [1, 1], 1, 40, frozenset(), i), 1) for i in range(2)
    )

    def guess(some, most):
        return [
            [1] * min(num, 7) if one is lanes[0] else []
            for one, num in zip(some, most, strict=True)
        ]

    phase = DraftPhase(most_idle=most_idle, is_due=lambda: len(model.batches) > 10)
    model.kv[0] = model.kv[WIDTH] = 1
    write_guessed(model, lanes, table, None, phase, guess=guess)
    assert lanes[0].is_complete and not lanes[1].is_complete
    assert len(model.batches) == num_steps


def test_a_path_that_fails_leaves_the_plain_drafts():
    """Red if an error in a step of guesses costs a request a token, or tokens that the
    failed steps wrote are handed out."""
    expected = drafts(KvDraft(97))
    model = KvDraft(97)
    model.guesses = GuessTable()
    model.guesses.share = 1.0
    decode, calls = model.decode, []

    def breaks(ids, rows, *args):
        calls.append(len(rows))
        if len(rows) > len(rows.unique()):
            raise RuntimeError("not today")
        return decode(ids, rows, *args)

    model.decode = breaks
    assert drafts(model) == expected
    assert model.paths.states[GUESSED_ROWS].state == OFF


def test_a_grammar_keeps_its_place():
    """Red if a request with a grammar is drafted for by guesses, which its grammar has
    not seen."""
    model = KvDraft(97)
    model.guesses = GuessTable()
    model.guesses.share = 1.0
    seen = []
    grammar = SimpleNamespace(mask_next=lambda row: None)
    grammar.advance = lambda token: seen.append(token) or True
    order = DraftRequest(0, [1, 2, 3], 0, 9, frozenset(), 0, grammar)
    table = torch.arange(WIDTH)[None]
    found = model.propose([order], table=table, sampling_info=None, phase=DraftPhase())
    assert tuple(seen) == found.tokens[0] and len(seen) == 9
    assert len(model.batches) == 11


def test_votes():
    """Red if something seen once is guessed, if the usual follower is lost by one
    exception, or if an old one stays for good."""
    table = GuessTable()
    for follower, guess in ((5, []), (5, [5]), (6, [5]), (5, [5]), (5, [5])):
        table.learn([1, 2, 3], [follower])
        assert table.guess([9, 2, 3], 1) == guess or follower == 6
    for _ in range(6):
        table.learn([1, 2, 3], [6])
    assert table.guess([1, 2, 3], 1) == [6]


def test_guesses_follow_each_other_and_end():
    """Red if a chain goes on behind a run that the table does not know, or is longer
    than it may be."""
    table = GuessTable()
    for _ in range(2):
        table.learn([1, 2, 3], [4, 5, 6, 7])
    assert table.guess([1, 2, 3], 9) == [4, 5, 6, 7]
    assert table.guess([1, 2, 3], 2) == [4, 5] and table.guess([1, 2, 3], 0) == []
    assert table.guess([3, 2], 9) == [] == table.guess([], 9)


def test_what_does_not_pay_costs_little():
    """Red if unforeseeable text turns guesses on, or all requests of a large batch are
    learnt from while they are off."""
    table = GuessTable()
    draw = torch.Generator().manual_seed(1)
    table.learn([1, 2, 3], torch.randint(5000, (4000,), generator=draw).tolist())
    assert table.share < 0.01 < LEAST_SHARE and not table.pays
    model = KvDraft(97)
    learnt = []
    model.guesses = table
    table.learn = lambda before, tokens: learnt.append(len(tokens))
    orders = [DraftRequest(i, [1, 2, 3], 0, 4, frozenset(), i) for i in range(8)]
    rows = WIDTH * torch.arange(8)[:, None] + torch.arange(WIDTH)
    model.propose(orders, table=rows, sampling_info=None, phase=DraftPhase())
    assert learnt == [4] * MOST_LEARNT


def test_a_full_table_begins_anew():
    """Red if the table grows without a bound."""
    table = GuessTable()
    for start in range(0, 2 * MOST_RUNS, 4096):
        table.learn([], range(start, start + 4096))
    assert len(table._followers) <= MOST_RUNS + 2 * 4096
