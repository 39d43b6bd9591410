"""Guesses of what a draft model writes next: the same drafts in fewer steps."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.drafting import draft_model
from sglang_parse.drafting.draft_model import MOST_LEARNT
from sglang_parse.drafting.guesses import LEAST_SHARE, MOST_RUNS, GuessTable
from sglang_parse.drafting.lanes import DraftPhase, DraftRequest, Lane, Lanes
from sglang_parse.sgl.fast_paths import GUESSED_ROWS, OFF, FastPaths
from tests.support.counting import GREEDY, VOCAB, CountingDraft

WIDTH = 400


class KvDraft(CountingDraft):
    """Its next token is a hash of all tokens before it, as its KV holds them: `next_of`
    of the text. A token whose KV is missing or of another token changes what follows.
    """

    def __init__(self, period: int) -> None:
        super().__init__()
        self.paths, self.period = FastPaths(), period
        self.kv = torch.full((8 * WIDTH,), -1)
        #: By row, the slots that a request may write.
        self.most = [WIDTH] * 8

    def next_of(self, text: list[int]) -> int:
        # Mostly a cycle, and now and then something else, by all that was read.
        if sum((i + 1) * t for i, t in enumerate(text)) % self.period == 0:
            return (3 * text[-1] + 1) % VOCAB
        return (text[-1] + 1) % 7

    def _forward(self, batch: SimpleNamespace, path: str = "") -> SimpleNamespace:
        self.batches.append(batch)
        self.kv[batch.out_cache_loc] = batch.input_ids
        logits = torch.zeros(len(batch.rows), VOCAB)
        for i, (row, num) in enumerate(zip(batch.rows, batch.seq_lens, strict=True)):
            text = self.kv[row * WIDTH : row * WIDTH + num].tolist()
            assert -1 not in text and num <= self.most[int(row)]
            logits[i, self.next_of(text)] = 1.0
        return SimpleNamespace(next_token_logits=logits)


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch):
    monkeypatch.setattr(draft_model, "draft_rows", lambda *args: GREEDY)
    monkeypatch.setattr(draft_model, "draft_tp_context", lambda layout: nullcontext())
    monkeypatch.setattr(draft_model, "draft_pp_context", nullcontext)


def drafts(model: KvDraft, *, most_steps: int = 1 << 30) -> list[list[int]]:
    """Four requests that come one after the other, each drafted for in windows."""
    table = WIDTH * torch.arange(8)[:, None] + torch.arange(WIDTH)
    texts = [[(5 * i + k) % 7 for k in range(4 + i)] for i in range(4)]
    read, window = [0] * 4, 17
    goals = [len(text) + n for text, n in zip(texts, (160, 90, 120, 200), strict=True)]
    for turn in range(400):
        chosen = [i for i in range(4) if turn >= 2 * i and len(texts[i]) < goals[i]]
        if not chosen:
            break
        orders = [
            DraftRequest(
                row=i,
                tokens=texts[i],
                num_cached=read[i],
                num_new=min(window, goals[i] - len(texts[i])),
                stop_ids=frozenset({61}),
                batch_index=k,
            )
            for k, i in enumerate(chosen)
        ]
        for one in orders:
            model.most[one.row] = len(one.tokens) + one.num_new - 1
        phase = DraftPhase(most_steps=most_steps)
        found = model.propose(orders, table=table, sampling_info=None, phase=phase)
        for k, i in enumerate(chosen):
            texts[i] = [*texts[i], *found.tokens[k]]
            read[i] = min(found.num_forwarded[k], len(texts[i]) - 1)
            if found.ended[k]:
                goals[i] = len(texts[i])
    return texts


@pytest.mark.parametrize("period", [3, 11, 97])
@pytest.mark.parametrize("most_steps", [3, 1 << 30])
@pytest.mark.parametrize("max_bs", [0, 6])
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


@pytest.mark.parametrize("max_bs", [0, 2, 6, 40])
def test_no_more_rows_than_are_captured(max_bs):
    """Red if guesses make a step larger than any that is captured."""
    model = KvDraft(97)
    model.runner.decode_cuda_graph_runner = SimpleNamespace(max_bs=max_bs)
    model.guesses = GuessTable()
    for _ in range(3):
        model.guesses.learn([1, 2, 3], [4, 5, 6, 0, 1, 2, 3] * 2)
    lanes = Lanes(
        Lane(DraftRequest(i, [1, 2, 3], 2, 30, frozenset(), i), 1) for i in range(4)
    )
    num_guesses = [num for _, _, num in model._chains(lanes)]
    most = {0: [8] * 4, 2: [0] * 4, 6: [2, 0, 0, 0], 40: [8] * 4}[max_bs]
    assert num_guesses == most


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
