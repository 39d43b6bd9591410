"""The draft loop, with a model whose next token is the last one plus one."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.drafting import draft_model, token_steps
from sglang_parse.drafting.draft_model import MOST_LEAD
from sglang_parse.drafting.lanes import DraftPhase, DraftRequest
from sglang_parse.drafting.spans import SHORT_GAP, read_ends
from sglang_parse.drafting.vocabularies import TokenizerMatch
from sglang_parse.sgl.readback import StepTokens
from tests.support.counting import GREEDY, VOCAB, CountingDraft


def request(row: int, tokens: list[int], num_new: int, **more) -> DraftRequest:
    fields = {"num_cached": 0, "stop_ids": frozenset(), "batch_index": row} | more
    return DraftRequest(row=row, tokens=tokens, num_new=num_new, **fields)


def propose(model: CountingDraft, requests: list[DraftRequest], **phase):
    table = 100 * torch.arange(4)[:, None] + torch.arange(40)
    found = model.propose(
        requests, table=table, sampling_info=None, phase=DraftPhase(**phase)
    )
    return found, table


class LateTokens(StepTokens):
    """As on a device that is at the last step when the host launches the next one."""

    def known(self) -> list[list[int]]:
        return self._up_to(max(0, len(self) - 1))


@pytest.mark.parametrize("kind", [StepTokens, LateTokens])
def test_windows_and_stops_do_not_depend_on_when_tokens_are_known(monkeypatch, kind):
    """Red if tokens after a stop token, or past a window, are handed out."""
    monkeypatch.setattr(token_steps, "StepTokens", kind)
    model = CountingDraft()
    requests = [
        request(0, [1, 2], 6),
        request(1, [9], 3),
        request(2, [20, 21, 22], 6, stop_ids=frozenset({25})),
        request(3, [30], 6, stop_ids=frozenset({36})),  # its last step
    ]
    proposal, _ = propose(model, requests)
    written = ((3, 4, 5, 6, 7, 8), (10, 11, 12), (23, 24), (31, 32, 33, 34, 35))
    assert proposal.tokens == written
    assert proposal.ended == (False, False, True, True)
    # The last drafted token of a request was never forwarded.
    assert proposal.num_forwarded[:2] == (7, 3)


def test_whole_prompts_are_read_in_parts(monkeypatch):
    """Red if the draft's catch-up is longer than a prefill, or loses its place."""
    prompts = [list(range(1, 21)), [30, 31, 32], list(range(40, 54))]
    requests = [request(i, p, 4, num_cached=i) for i, p in enumerate(prompts)]
    expected, _ = propose(CountingDraft(), requests)
    for limit in (1, 5, 8, 36, 37):
        model = CountingDraft(longest_extend=limit)
        proposal, table = propose(model, requests)
        assert proposal == expected
        parts = [b for b in model.batches if b.mode.is_extend()]
        lens = [len(b.input_ids) for b in parts]
        assert max(lens) <= limit and sum(lens) == 19 + 11 == proposal.num_read
        # The last token of each, and a whole short gap, are left to the steps.
        long = [r for r in requests if len(r.tokens) - r.num_cached > MOST_LEAD]
        ids = torch.cat([b.input_ids for b in parts]).tolist()
        assert ids == [t for r in long for t in r.tokens[r.num_cached : -1]]
        slots = torch.cat([b.out_cache_loc for b in parts]).tolist()
        assert slots == [
            int(table[r.row, n]) for r in long for n in range(r.row, len(r.tokens) - 1)
        ]
        first = model.batches[len(parts)]
        assert first.input_ids.tolist() == [20, 31, 53]
        assert first.positions.tolist() == [19, 1, 13]


def test_short_gaps_are_read_up_to_their_last_token_and_long_ones_in_turn():
    """Red if a burst of long prompts is read in one round, if a long one waits behind
    later ones, or if a request that has caught up goes without a draft."""
    spans = [(0, 500), (10, 12), (0, 300), (100, 164), (5, 71)]
    assert read_ends(spans, 1000, lead=4) == [499, 10, 299, 163, 70]
    assert read_ends(spans, 600, lead=4) == [499, 10, 101, 163, 5]
    assert read_ends(spans, 200, lead=4) == [200, 10, 0, 163, 5]
    # One token is left to a step at least, and a gap of the lead wholly.
    edges = [(0, 4), (0, 5), (0, 65), (0, 66)]
    assert read_ends(edges, 10, lead=4) == [0, 4, 64, 10]


def test_a_burst_of_long_prompts_is_read_over_several_rounds(monkeypatch):
    """Red if a round reads more than a prefill does, if a text is read twice or with a
    hole, or if drafts differ from those of a text that was read at once."""
    monkeypatch.setattr(draft_model, "draft_rows", lambda *args: GREEDY)
    monkeypatch.setattr(draft_model, "draft_tp_context", lambda layout: nullcontext())
    monkeypatch.setattr(draft_model, "draft_pp_context", nullcontext)
    table = 1000 * torch.arange(4)[:, None] + torch.arange(400)
    texts = [[(i + k) % VOCAB for k in range(n)] for i, n in enumerate((200, 3, 150))]
    expected, read = [t[-1] + 1 for t in texts], [0, 0, 0]
    limit, seen, drafts = 96, [set() for _ in texts], {}
    for _ in range(4):
        model = CountingDraft(longest_extend=limit)
        orders = [request(i, t, 2, num_cached=read[i]) for i, t in enumerate(texts)]
        found = model.propose(
            orders, table=table, sampling_info=None, phase=DraftPhase()
        )
        extends = [b for b in model.batches if b.mode.is_extend()]
        forwarded = sum(len(b.input_ids) for b in extends)
        assert forwarded <= limit + 3 * SHORT_GAP
        assert found.num_read == forwarded
        for b in model.batches:
            for token, slot in zip(
                b.input_ids.tolist(), b.out_cache_loc.tolist(), strict=True
            ):
                row, column = divmod(slot, 1000)
                if column >= len(texts[row]):
                    continue  # drafted
                assert texts[row][column] == token and column not in seen[row]
                seen[row].add(column)
        for i, tokens in enumerate(found.tokens):
            num = found.num_forwarded[i]
            assert bool(tokens) == (num >= len(texts[i])) and found.is_complete[i]
            if tokens:
                drafts[i] = tokens[0]
            assert seen[i] == set(range(min(num, len(texts[i]))))
            read[i] = min(num, len(texts[i]) - 1)
            seen[i].discard(len(texts[i]) - 1)
    assert drafts == {i: t % VOCAB for i, t in enumerate(expected)}
    assert [len(s) for s in seen] == [len(t) - 1 for t in texts]


def test_catching_up_with_a_few_tokens_is_captured_steps():
    """Red if a phase begins with an eager extend beside graphs, if a step takes
    a token at another's place, or if a longer gap is stepped through."""
    requests = [
        request(0, [1, 2, 3], 2, num_cached=2),
        request(1, [9, 10], 2, num_cached=0),
        request(2, [30, 31, 32, 33], 2, num_cached=2),
    ]
    model = CountingDraft()
    proposal, table = propose(model, requests)
    assert proposal.tokens == ((4, 5), (11, 12), (34, 35))
    assert proposal.num_read == 0 and proposal.num_steps == len(model.batches) == 3
    assert not any(b.mode.is_extend() for b in model.batches)
    first, second, _ = model.batches
    assert first.input_ids.tolist() == [3, 9, 32]
    assert first.positions.tolist() == [2, 0, 2]
    assert second.input_ids.tolist() == [4, 10, 33]
    assert second.positions.tolist() == [3, 1, 3]
    assert second.out_cache_loc.tolist() == [
        int(table[row, n]) for row, n in ((0, 3), (1, 1), (2, 3))
    ]
    for num in (MOST_LEAD, MOST_LEAD + 1):
        model = CountingDraft()
        propose(model, [request(0, list(range(num)), 2)])
        lens = [len(b.input_ids) for b in model.batches if b.mode.is_extend()]
        assert lens == ([] if num == MOST_LEAD else [MOST_LEAD])


@pytest.mark.parametrize("kind", [StepTokens, LateTokens])
def test_a_phase_that_ends_early_is_gone_on_with(monkeypatch, kind):
    """Red if a draft over several phases loses, repeats or changes a token, or if one
    that is not as long as it was to be counts as complete."""
    monkeypatch.setattr(token_steps, "StepTokens", kind)
    whole, _ = propose(CountingDraft(), [request(0, [1, 2, 3], 7)])
    assert whole.is_complete == (True,)
    tokens, cached, drafted, num_phases = [1, 2, 3], 0, (), 0
    while len(drafted) < 7:
        order = request(0, [*tokens, *drafted], 7 - len(drafted), num_cached=cached)
        found, _ = propose(CountingDraft(), [order], most_steps=3)
        drafted, cached = drafted + found.tokens[0], found.num_forwarded[0]
        assert found.num_steps <= 3
        assert found.is_complete == (len(drafted) == 7,)
        assert cached == 3 + len(drafted) - 1
        num_phases += 1
    assert drafted == whole.tokens[0] and num_phases > 1
    assert cached == whole.num_forwarded[0]


def test_leads_of_different_lengths_do_not_touch_each_other():
    """Red if a lane drafts behind a token of its lead, or at another's place."""
    orders = [
        request(0, [1, 2, 3, 4], 4, num_cached=1),
        request(1, [20, 21, 22], 6, num_cached=2),
    ]
    both, _ = propose(CountingDraft(), orders)
    for i, order in enumerate(orders):
        alone, _ = propose(CountingDraft(), [order])
        assert both.tokens[i] == alone.tokens[0]
        assert both.num_forwarded[i] == alone.num_forwarded[0]
    assert both.tokens == ((5, 6, 7, 8), (23, 24, 25, 26, 27, 28))


def test_a_phase_ends_where_requests_waited_long_enough():
    """Red if complete drafts wait for a long one, or if nobody waits and it ends."""
    orders = [request(0, [1], 2), request(1, [9], 20)]
    found, _ = propose(CountingDraft(), orders, most_idle=3)
    # The first is complete after two steps, and waits in steps 2, 3 and 4.
    assert found.num_steps == 4 and found.is_complete == (True, False)
    assert found.tokens == ((2, 3), (10, 11, 12, 13))
    found, _ = propose(CountingDraft(), orders[1:], most_idle=3)
    assert found.num_steps == 20 and found.is_complete == (True,)
    found, _ = propose(CountingDraft(), orders[1:], most_idle=6, num_idle=2)
    assert found.num_steps == 3 and found.is_complete == (False,)


def test_a_stop_token_among_what_is_read_first_ends_nothing():
    """Red if the model's choice behind a token of the lead counts as drafted."""
    stops = frozenset({2})
    order = request(0, [1, 10, 20], 3, num_cached=0, stop_ids=stops)
    found, _ = propose(CountingDraft(), [order])
    assert found.tokens == ((21, 22, 23),) and found.ended == (False,)


def test_draft_with_more_padded_rows_keeps_to_the_target():
    """Red if a token that the target's embedding lacks is drafted."""
    proposal, _ = propose(CountingDraft(vocab_size=32), [request(0, [30], 3)])
    assert proposal.tokens == ((31, 0, 1),)


def test_tokens_without_a_row_in_the_draft_are_read_as_another():
    """Red if an id of the target's longer padding, which a request may hold and the
    target may sample, is looked up where the draft's embedding ends: on a GPU that
    stops the server."""
    model = CountingDraft()
    requests = [
        request(0, [1, VOCAB, 2], 2),
        request(1, [3, VOCAB + 9], 1),
        request(2, [5, VOCAB, 6, VOCAB + 3, 7, VOCAB + 1], 1),
    ]
    propose(model, requests)
    read, *steps = model.batches
    assert read.mode.is_extend() and read.input_ids.tolist() == [5, 0, 6, 0, 7]
    first, second, *_ = steps
    assert first.input_ids.tolist() == [1, 3, 0]
    assert second.input_ids.tolist()[:2] == [0, 0]
    assert all(int(b.input_ids.max()) < VOCAB for b in steps)


def test_lengths_on_the_host_are_those_on_the_device():
    """Red if a captured step is planned for other lengths than it runs with."""
    model = CountingDraft()
    proposal, table = propose(model, [request(0, [1, 2], 7), request(1, [9], 2)])
    assert proposal.tokens == ((3, 4, 5, 6, 7, 8, 9), (10, 11))
    # A step for the first token that is read, and one for each but the last drafted.
    assert len(model.batches) == 8
    for i, batch in enumerate(model.batches):
        expected = torch.tensor([i, min(i, 1)])
        assert not batch.mode.is_extend()
        assert batch.positions.tolist() == expected.tolist()
        assert batch.seq_lens.tolist() == (expected + 1).tolist()
        assert batch.seq_lens_cpu.tolist() == (expected + 1).tolist()
        assert batch.out_cache_loc.tolist() == [
            int(table[0, i]),
            int(table[1, min(i, 1)]),
        ]


class FakeChain:
    """Records the tokens a grammar is walked over, and where it masks."""

    def __init__(self, refuses: int | None = None) -> None:
        self.log: list = []
        self.refuses = refuses

    def mask_next(self, logits) -> None:
        assert logits.shape == (1, VOCAB)
        self.log.append("mask")

    def advance(self, token: int) -> bool:
        self.log.append(token)
        return token != self.refuses


def test_grammars_walk_over_every_drafted_token_and_no_other():
    """Red if a grammar misses the last token (its mask is asked for behind it), walks
    over a stop token or goes on behind its window."""
    chains = [FakeChain(), FakeChain(), FakeChain()]
    requests = [
        request(0, [1], 2, grammar=chains[0]),
        request(1, [9], 4, grammar=chains[1]),
        request(2, [20], 4, grammar=chains[2], stop_ids=frozenset({22})),
    ]
    propose(CountingDraft(), requests)
    assert chains[0].log == ["mask", 2, "mask", 3]
    assert chains[1].log == ["mask", 10, "mask", 11, "mask", 12, "mask", 13]
    assert chains[2].log == ["mask", 21, "mask"]


def test_a_draft_ends_before_what_its_grammar_refuses():
    """Red if the target is asked behind a token for which there is no mask, or the
    neighbour's draft ends too."""
    chains = [FakeChain(refuses=12), FakeChain()]
    requests = [
        request(0, [9], 6, grammar=chains[0]),
        request(1, [1], 4, grammar=chains[1]),
    ]
    model = CountingDraft()
    proposal, _ = propose(model, requests)
    assert proposal.tokens == ((10, 11), (2, 3, 4, 5))
    assert proposal.ended == (False, False)
    assert chains[0].log == ["mask", 10, "mask", 11, "mask", 12]
    assert len(model.batches) == 4  # nobody waits for the first one's window


@pytest.mark.parametrize(("kind", "steps"), [(StepTokens, 2), (LateTokens, 3)])
def test_loop_ends_where_all_are_known_to_have_stopped(monkeypatch, kind, steps):
    """Red if a draft that has ended keeps the model busy for the whole window."""
    monkeypatch.setattr(token_steps, "StepTokens", kind)
    model = CountingDraft()
    ends = request(0, [1], 30, stop_ids=frozenset({3}))
    proposal, _ = propose(model, [ends, request(1, [9], 2)])
    assert proposal.tokens == ((2,), (10, 11)) and proposal.ended == (True, False)
    assert len(model.batches) == steps


def test_what_the_tokenizers_do_not_share_is_neither_drafted_nor_read():
    """Red if a marker of one side alone reaches the other: the token before it wants
    it most, and a committed one is read as the neutral token."""
    model = CountingDraft()
    model.runner = SimpleNamespace(device="cpu")
    model.set_unshared(TokenizerMatch("one", unshared=frozenset({6, 99}), neutral=9))
    proposal, _ = propose(model, [request(0, [5], 1), request(1, [2, 6], 2)])
    assert proposal.tokens == ((0,), (10, 11))
    first, second, *_ = model.batches
    assert first.input_ids.tolist() == [5, 2]
    assert second.input_ids.tolist() == [5, 9]
