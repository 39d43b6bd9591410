"""The draft model as a drafter: what it is asked, and which KV it is known to have."""

from __future__ import annotations

import random
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.drafting.drafter import DrafterResources, Prefill
from sglang_parse.drafting.model_drafter import ModelDrafter
from sglang_parse.judging.decide import Decision
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.round_records import Kept, RequestRound, Round
from sglang_parse.requests.state import RequestState
from tests.support.counting import VOCAB, CountingDraft

TABLE = 100 * torch.arange(4)[:, None] + torch.arange(100)
BATCH = SimpleNamespace(sampling_info=None)


def make_drafter() -> ModelDrafter:
    drafter = ModelDrafter(CountingDraft())
    slots = SimpleNamespace(table=TABLE, tell=lambda note: None)
    drafter.open(DrafterResources(slots, 400, None))
    return drafter


def make_state(stops=(), **more) -> RequestState:
    return RequestState(None, frozenset(stops), None, report=None, **more)


def record(
    state: RequestState, output, *, row: int = 1, window: int = 4, asked: bool = True
) -> RequestRound:
    """A request with a prompt of 3 tokens, its pending tokens its draft."""
    kv = SimpleNamespace(kv_allocated_len=95)
    req = SimpleNamespace(origin_input_ids=[1, 2, 3], output_ids=list(output), kv=kv)
    r = RequestRound(req, state, row, 2 + len(output), output[-1], len(output))
    r.draft = state.draft.first(window)
    r.window, r.budgets = window, {"model": window} if asked else {}
    return r


def decide(drafter: ModelDrafter, round: Round, *decisions: Decision) -> None:
    for r, decision in zip(round, decisions, strict=True):
        r.kept = Kept(decision=decision)
    drafter.after_pass(round)


def plain(token: int) -> Decision:
    return Decision((token,), 0, 0, ())


def num_known(drafter: ModelDrafter, row: int) -> int:
    return drafter.flags.num_leading([TABLE[row, :90]])[0]


def test_a_draft_of_nothing_is_remembered():
    """Red if a model that says at once that the answer ends has the whole prompt to
    read again in the next round."""
    drafter = make_drafter()
    states = [make_state({5, 10}) for _ in range(2)]
    for output, read in ([4], [1, 2, 3, 4]), ([4, 9], [9]):
        drafter.flags.mark(TABLE, [(2, 0, 10, 10)])
        first = record(states[0], output)
        other = record(states[1], output, row=2, window=0, asked=False)
        round = Round(BATCH, [first, other])
        drafter.draft(round)
        assert [r.draft.tokens for r in round] == [(), ()] and first.draft.ended
        forwarded = [t for b in drafter.model.batches for t in b.input_ids.tolist()]
        assert forwarded == read
        drafter.model.batches.clear()
        decide(drafter, round, plain(9), plain(9))
        known = 3 + len(output)
        assert drafter._memory[first.state].num_cached == num_known(drafter, 1) == known
        # The other was not asked.
        assert other.state not in drafter._memory
        assert num_known(drafter, 2) == known - 1


def test_only_requests_with_a_budget_are_drafted_for():
    """Red if the model writes for a request that another drafter has, whose draft has
    ended or fills its window, or whose grammar allows nothing."""
    drafter = make_drafter()
    wanted, unasked, full, ended, dead = (
        record(make_state(), [4], row=row) for row in (0, 1, 2, 3, 3)
    )
    unasked.budgets = {}
    full.draft, ended.draft = Draft((7,) * 4), Draft((7,), ended=True)
    dead.grammar = SimpleNamespace(is_dead=True)
    round = Round(BATCH, [unasked, full, wanted, ended, dead])
    drafter.draft(round)
    assert wanted.draft.tokens == (5, 6, 7, 8)
    assert wanted.draft.parts == (("model", 4),)
    assert [r.draft.num_new for r in round] == [0, 0, 4, 0, 0]


def test_it_goes_on_where_another_drafter_stopped():
    """Red if it writes over tokens of a drafter before it, or past the window."""
    drafter = make_drafter()
    r = record(make_state(), [4], window=5)
    r.draft = Draft().extended("eagle3", (20, 21), ended=False, token_level=True)
    drafter.draft(Round(BATCH, [r]))
    assert r.draft.tokens == (20, 21, 22, 23, 24)
    assert (r.draft.num_token_level, r.draft.num_segment_level) == (2, 3)


def test_a_kept_client_text_has_none_of_its_kv():
    """Red if slots of a text that the model never read keep the flags of the tokens
    that they held before."""
    drafter = make_drafter()
    drafter.flags.mark(TABLE, [(1, 0, 90, 90)])
    r = RequestRound(None, make_state(), 1, 4, 3, output_len=0)
    decide(drafter, Round(BATCH, [r]), Decision((7, 8, 9), 2, 0, ()))
    assert num_known(drafter, 1) == 4
    assert not drafter.flags._valid[TABLE[1, 4:7]].any()


def test_a_prefill_forgets_what_its_slots_held():
    """Red if the model attends to KV of another request."""
    drafter = make_drafter()
    drafter.flags.mark(TABLE, [(1, 0, 10, 10)])
    batch = SimpleNamespace(out_cache_loc=TABLE[1, 6:9])
    drafter.before_prefill(Prefill(batch, []))
    assert num_known(drafter, 1) == 6


@pytest.mark.parametrize("seed", range(40))
def test_flags_are_true_of_the_tokens_that_were_decided(seed):
    """Red if a slot counts as holding the model's KV of a token that it never read
    there, or a token that it read is read again; or if a draft goes on from another
    token than the last one."""
    rng, drafter = random.Random(seed), make_drafter()
    model, state, output = drafter.model, make_state(), [4]
    held: dict[int, int] = {}  # slot -> the token whose KV the model wrote there last
    num_read = num_asked = 0
    while len(output) < 60:
        window = rng.choice([0, 3, 8])
        asked = rng.random() < 0.6
        window = max(window, len(state.pending))
        if rng.random() < 0.1:
            state.draft = Draft()  # what was pending is dropped
        most_steps = rng.choice([2, 5, 1 << 30])
        is_drafting = True
        while is_drafting:
            r = record(state, output, window=window, asked=asked)
            text_len = len(r.tokens) + len(state.pending)
            round = Round(BATCH, [r], most_draft_steps=most_steps)
            drafter.draft(round)
            for batch in model.batches:
                slots, tokens = batch.out_cache_loc.tolist(), batch.input_ids.tolist()
                held.update(zip(slots, tokens, strict=True))
                num_read += sum(slot < TABLE[1, text_len] for slot in slots)
            num_asked += bool(model.batches)
            model.batches.clear()
            state.draft, is_drafting = r.draft, r.is_drafting
        draft = r.draft.tokens
        before = (*output, *draft)[-1 - r.draft.num_new :]
        assert all(b == (a + 1) % VOCAB for a, b in pairwise(before))
        kept = rng.randint(0, len(draft))
        agrees = kept < len(draft) and rng.random() < 0.7
        bonus = draft[kept] if agrees else rng.choice([40, 50])
        pending = draft[kept + 1 :] if agrees and rng.random() < 0.7 else ()
        decide(drafter, round, Decision((*draft[:kept], bonus), kept, 0, pending))
        state.draft = Draft(pending)
        output += r.decision.accept_tokens
        sequence = [1, 2, 3, *output]
        for position in range(r.new_len):
            if drafter.flags._valid[TABLE[1, position]]:
                assert held[int(TABLE[1, position])] == sequence[position]
        if r.draft.num_new:
            # All that it has read, of what was kept, is known.
            assert num_known(drafter, 1) >= r.seq_len + min(kept + 1, len(draft))
    # The token it goes on from may be read twice.
    assert num_read <= len(sequence) + num_asked


@pytest.mark.parametrize("num_kept", [0, 2, 7])
def test_a_draft_of_several_phases_leaves_the_flags_of_one(num_kept):
    """Red if the KV of tokens that were drafted in an earlier phase is read again, or
    counts where the output left the draft."""
    flags, drafts, tables = [], [], []
    for most_steps in (1 << 30, 3, 1):
        drafter, state = make_drafter(), make_state()
        for _ in range(20):
            r = record(state, [4], window=7)
            round = Round(BATCH, [r], most_draft_steps=most_steps)
            drafter.draft(round)
            assert round.num_draft_steps <= most_steps
            state.draft = r.draft
            if not r.is_drafting:
                break
        drafts.append(r.draft)
        forwarded = [
            (slot, token)
            for b in drafter.model.batches
            for slot, token in zip(
                b.out_cache_loc.tolist(), b.input_ids.tolist(), strict=True
            )
        ]
        # No token is forwarded twice.
        assert len(set(forwarded)) == len(forwarded) == 4 + 6
        tables.append(forwarded)
        tokens = r.draft.tokens
        if num_kept == len(tokens):
            decision = Decision((*tokens, 40), num_kept, 0, ())
        else:
            decision = Decision((*tokens[:num_kept], 40), num_kept, 0, ())
        decide(drafter, round, decision)
        # The last token of a draft was not forwarded; the one behind it was not its.
        assert num_known(drafter, 1) == 4 + min(num_kept, 6)
        assert drafter._memory[state].num_cached == num_known(drafter, 1)
        flags.append(drafter.flags._valid.tolist())
    assert drafts[0].tokens == (5, 6, 7, 8, 9, 10, 11)
    assert drafts[0].parts == (("model", 7),)
    assert drafts == [drafts[0]] * 3
    assert tables == [tables[0]] * 3
    assert flags == [flags[0]] * 3


def test_a_pause_costs_the_same_however_long_it_is():
    """Red if each round in which the model does not run visits all tokens that it
    lacks."""
    drafter, state, output = make_drafter(), make_state(), [4]
    marked, mark = [], drafter.flags.mark

    def spy(table, spans):
        marked.extend(end - start for _, start, _, end in spans)
        mark(table, spans)

    drafter.flags.mark = spy
    round = Round(BATCH, [record(state, output)])
    drafter.draft(round)
    decide(drafter, round, plain(9))
    marked.clear()
    for _ in range(50):
        output.append(9)
        round = Round(BATCH, [record(state, output, asked=False)])
        drafter.draft(round)
        decide(drafter, round, plain(9))
    assert marked == [1] * 50
    # Once it runs again, it reads them, and they count.
    output.append(9)
    round = Round(BATCH, [record(state, output)])
    drafter.draft(round)
    decide(drafter, round, plain(10))
    assert num_known(drafter, 1) == 3 + len(output)


def test_a_drafter_that_failed_for_a_request_is_not_asked_again():
    """Red if its error comes up in every round."""
    drafter = make_drafter()
    failed = make_state(failed_drafters={"model"})
    assert not drafter.can_draft(record(failed, [4]))
    assert drafter.can_draft(record(make_state(), [4]))


def test_it_drafts_as_far_as_it_reads():
    """Red if a model is given a position behind its last, or the report does not say
    that it wrote no more, or says so of a request that it can still follow."""
    drafter = make_drafter()
    drafter.model.reach = 13
    state = make_state()
    state.report = SimpleNamespace(fallback="")
    r = record(state, [4, 5], window=40)
    assert drafter.can_draft(r)
    drafter.draft(Round(BATCH, [r]))
    assert len(r.draft.tokens) == 13 - 5 and not r.is_drafting
    assert state.report.fallback == ""
    assert not drafter.can_draft(record(state, [4, 5, 6]))
    assert state.report.fallback == "draft_context"
