"""A head of the draft model: the same drafts in fewer steps, whatever it guesses."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.drafting import draft_model
from sglang_parse.drafting.draft_head import DraftHead, num_likely
from sglang_parse.drafting.lanes import DraftPhase, DraftRequest, Lanes
from sglang_parse.drafting.pace import LENGTHS, LONGEST, PERIOD, TRIAL, Pace
from sglang_parse.sgl.fast_paths import GUESSED_ROWS, OFF
from sglang_parse.sgl.ranks import Ranks
from tests.support.counting import GREEDY, VOCAB
from tests.support.kv_draft import WIDTH, KvDraft, KvHead, drafts

ONE_RANK = Ranks(SimpleNamespace(world_size=1))


@pytest.fixture(autouse=True)
def no_ranks(monkeypatch):
    monkeypatch.setattr(draft_model, "draft_rows", lambda *args: GREEDY)
    monkeypatch.setattr(draft_model, "draft_tp_context", lambda layout: nullcontext())
    monkeypatch.setattr(draft_model, "draft_pp_context", nullcontext)


def with_head(period: int, right: float, *, adaptive: bool = False) -> KvDraft:
    draft = KvDraft(period)
    head = KvHead(draft, right)
    draft.head = DraftHead(head, draft, ONE_RANK, adaptive=adaptive)
    return draft


@pytest.mark.parametrize("period", [3, 97])
@pytest.mark.parametrize("right", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("most_steps", [3, 1 << 30])
@pytest.mark.parametrize("max_bs", [0, 6])
def test_drafts_with_a_head_are_those_without(period, right, most_steps, max_bs):
    """Red if a guess that the model does not write is kept, if its KV is, if the head
    is shown another text or place than the draft has read, or goes on elsewhere."""
    plain, guessed = KvDraft(period), with_head(period, right)
    if max_bs:
        guessed.runner.decode_cuda_graph_runner = SimpleNamespace(max_bs=max_bs)
    assert drafts(guessed, most_steps=most_steps) == drafts(
        plain, most_steps=most_steps
    )
    if right == 1.0 and most_steps > 3 and not max_bs:
        assert len(guessed.batches) < 0.4 * len(plain.batches)


def test_the_head_reads_all_that_the_draft_keeps():
    """Red if the head lacks a position behind which it guesses: that costs agreement
    in silence."""
    draft = with_head(97, 0.7)
    order = DraftRequest(0, [1, 2, 3, 4, 5, 6, 0], 0, 40, frozenset(), 0)
    table = torch.arange(WIDTH)[None]
    found = draft.propose([order], table=table, sampling_info=None, phase=DraftPhase())
    read = draft.head.model.read
    assert read == [(0, k) for k in range(found.num_forwarded[0])]


class SampledDraft(KvDraft):
    """Each next token is the last one plus one, two or three, drawn."""

    steps = torch.tensor([0.0, 0.6, 0.3, 0.1])

    def next_of(self, text: list[int]) -> int:
        return (text[-1] + 1) % VOCAB

    def sample(self, logits, position, sampling) -> torch.Tensor:
        drawn = self.steps.multinomial(len(logits), replacement=True)
        return (logits.argmax(-1) - 1 + drawn) % VOCAB


def test_sampled_drafts_keep_their_distribution():
    """Red if a guess is likelier in a draft because it was guessed. The head always
    guesses the likeliest token; shares are within 0.015 of the draft's own."""
    torch.manual_seed(3)
    draft = SampledDraft(97)
    draft.head = DraftHead(KvHead(draft, 1.0), draft, ONE_RANK, adaptive=False)
    table, found = torch.arange(2 * WIDTH).view(2, WIDTH), torch.zeros(4)
    for _ in range(40):
        orders = [DraftRequest(i, [1, 2, 3], 0, 300, frozenset(), i) for i in (0, 1)]
        done = draft.propose(
            orders, table=table, sampling_info=None, phase=DraftPhase()
        )
        for tokens in done.tokens:
            steps = torch.tensor([3, *tokens]).diff() % VOCAB
            found += steps.bincount(minlength=4)
    assert found.sum() == 40 * 2 * 300
    assert (found / found.sum() - draft.steps).abs().max() < 0.015
    # By chance of 0.6 a guess holds: 1.6 and more tokens a step.
    assert len(draft.batches) < 0.7 * 40 * 300


def test_a_head_that_fails_leaves_the_plain_drafts():
    """Red if an error of the head costs a request a token, or it is asked again."""
    for name, reads in (("propose", True), ("follow", False)):
        draft, calls = with_head(97, 1.0), []

        def breaks(*args, calls=calls):
            calls.append(args)
            raise RuntimeError("not today")

        setattr(draft.head.model, name, breaks)
        assert drafts(draft) == drafts(KvDraft(97))
        assert draft.paths.states[GUESSED_ROWS].state == OFF
        assert len(calls) == 1 and bool(draft.head.model.read) == reads


def test_a_grammar_is_drafted_for_without_the_head():
    """Red if the head guesses what a grammar has not seen."""
    draft = with_head(97, 1.0)
    grammar = SimpleNamespace(mask_next=lambda row: None, advance=lambda token: True)
    order = DraftRequest(0, [1, 2, 3], 0, 9, frozenset(), 0, grammar)
    table = torch.arange(WIDTH)[None]
    draft.propose([order], table=table, sampling_info=None, phase=DraftPhase())
    assert len(draft.batches) == 11 and not draft.head.model.read


def test_guesses_end_where_they_are_unlikely():
    """Red if rows are spent on guesses that hardly hold, or likely ones are left out.
    0.2 is the least."""
    assert num_likely((0.9, 0.5, 0.5, 0.5)) == 3
    assert num_likely((0.1, 0.9)) == 0 and num_likely((1.0,) * 4) == 4


def test_the_clock_decides_for_each_load(monkeypatch):
    """Red if a head goes on guessing where that is slower, if it is left out where it
    is faster, or if what was measured of one load counts for another."""
    clock = [0.0]
    monkeypatch.setattr(
        "sglang_parse.drafting.draft_head.perf_counter", lambda: clock[0]
    )
    head = DraftHead(None, None, ONE_RANK, adaptive=True)

    def run(num: int, speeds: dict[int, float]) -> int:
        most = head.choose(num)

        def write() -> Lanes:
            clock[0] += 30 * num / speeds[most]
            return Lanes(SimpleNamespace(tokens=[0] * 30) for _ in range(num))

        head.timed(most, torch.device("cpu"), write)
        return most

    fast_alone = {4: 300.0, 1: 250.0, 0: 100.0}
    slow_together = {4: 100.0, 1: 250.0, 0: 300.0}
    for _ in range(TRIAL * len(LENGTHS)):
        run(1, fast_alone)
        run(16, slow_together)
    assert [run(1, fast_alone) for _ in range(50)] == [4] * 50
    assert [run(17, slow_together) for _ in range(50)] == [0] * 50
    # The card is slow with long chains from now on, and a later trial sees it.
    found = [run(16, {**slow_together, 1: 900.0}) for _ in range(3 * PERIOD)]
    assert found[-1] == 1
    # Or shorter ones get faster than those in use, while none are far slower.
    found = [run(1, {**fast_alone, 1: 900.0}) for _ in range(3 * PERIOD)]
    assert found[-1] == 1


@pytest.mark.parametrize("num_phases", [2500, 10 * PERIOD])
def test_a_head_that_never_agrees_costs_little(num_phases):
    """Red if trials of a head that makes drafting two to four times as slow take more
    than 1% of the time, the first ones of three loads included."""
    cost = {0: 1.0, 1: 2.0, 4: 3.8}
    pace, took = Pace(), 0.0
    for i in range(num_phases):
        load = (1, 2, 4)[i % 3]
        most = pace.choose(load)
        pace.note(load, most, 20, cost[most])
        took += cost[most]
    assert num_phases < took < 1.01 * num_phases


def test_a_head_that_is_hardly_faster_is_off():
    """Red if a head writes that looks 2% faster, which two trials do by chance, or if
    one that is 10% faster does not."""
    for faster, chosen in ((1.02, 0), (1.1, 1)):
        pace, speeds = Pace(), {0: 100.0, 1: 100.0 * faster, 4: 80.0}
        for _ in range(TRIAL * len(LENGTHS)):
            most = pace.choose(1)
            pace.note(1, most, 20, 20 / speeds[most])
        assert pace.choose(1) == chosen


def test_without_adaptive_windows_all_chains_are_long():
    """Red if `--no-speculative-parse-adaptive` has the clock decide."""
    head = DraftHead(None, None, ONE_RANK, adaptive=False)
    for _ in range(50):
        assert head.choose(3) == LONGEST
        head.timed(LONGEST, torch.device("cpu"), Lanes)
