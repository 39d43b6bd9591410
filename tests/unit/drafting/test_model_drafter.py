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


def make_drafter(*, runs_ahead: bool = False) -> ModelDrafter:
    drafter = ModelDrafter(CountingDraft())
    slots = SimpleNamespace(table=TABLE, tell=lambda note: None)
    drafter.open(DrafterResources(slots, 400, None, 0, runs_ahead=runs_ahead))
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
    r.draft = Draft(state.pending[:window])
    r.window, r.budgets = window, {"model": window} if asked else {}
    return r


def decide(drafter: ModelDrafter, round: Round, *decisions: Decision) -> None:
    for r, decision in zip(round, decisions, strict=True):
        r.kept = Kept(decision=decision)
    drafter.after_pass(round)


def plain(token: int) -> Decision:
    return Decision((token,), 0, 0, ())


def num_known(drafter: ModelDrafter, row: int) -> int:
    return drafter.flags.num_leading(TABLE[row, :90])


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
        assert drafter.model.batches[-1].input_ids.tolist() == read
        decide(drafter, round, plain(9), plain(9))
        known = 3 + len(output)
        assert drafter._of(first).num_cached == num_known(drafter, 1) == known
        # The other was not asked.
        assert drafter._of(other).num_cached is None
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


@pytest.mark.parametrize("runs_ahead", [False, True])
@pytest.mark.parametrize("seed", range(40))
def test_flags_are_true_of_the_tokens_that_were_decided(seed, runs_ahead):
    """Red if a slot counts as holding the model's KV of a token that it never read
    there, or a token that it read is read again; or if a draft goes on from another
    token than the last one."""
    rng, drafter = random.Random(seed), make_drafter(runs_ahead=runs_ahead)
    model, state, output = drafter.model, make_state(), [4]
    held: dict[int, int] = {}  # slot -> the token whose KV the model wrote there last
    num_read = num_asked = 0
    while len(output) < 60:
        window = rng.choice([0, 3, 8])
        asked = rng.random() < 0.6
        r = record(state, output, window=max(window, len(state.pending)), asked=asked)
        if rng.random() < 0.1:
            r.draft = Draft()  # what was pending is dropped
        round = Round(BATCH, [r])
        drafter.draft(round)
        for batch in model.batches:
            slots, tokens = batch.out_cache_loc.tolist(), batch.input_ids.tolist()
            held.update(zip(slots, tokens, strict=True))
            num_read += len(tokens) if batch.mode.is_extend() else 0
        model.batches.clear()
        num_asked += bool(r.draft.num_new)
        draft = r.draft.tokens
        before = (*output, *draft)[-1 - r.draft.num_new :]
        assert all(b == (a + 1) % VOCAB for a, b in pairwise(before))
        kept = rng.randint(0, len(draft))
        agrees = kept < len(draft) and rng.random() < 0.7
        bonus = draft[kept] if agrees else rng.choice([40, 50])
        pending = draft[kept + 1 :] if agrees and rng.random() < 0.7 else ()
        decide(drafter, round, Decision((*draft[:kept], bonus), kept, 0, pending))
        state.pending = pending
        output += r.decision.accept_tokens
        sequence = [1, 2, 3, *output]
        for position in range(r.new_len):
            if drafter.flags._valid[TABLE[1, position]]:
                assert held[int(TABLE[1, position])] == sequence[position]
        if r.draft.num_new:
            # All that it has read, of what was kept, is known.
            assert num_known(drafter, 1) >= r.seq_len + min(kept + 1, len(draft) - 1)
    # The token it goes on from may be read twice.
    assert num_read <= len(sequence) + num_asked


STATES = [make_state() for _ in range(3)]
# Kept whole with the target's token behind it; cut; cut with a rest that is pending.
DECISIONS = [
    Decision((11, 12, 13, 14, 40), 4, 0, ()),
    Decision((21, 41), 1, 0, ()),
    Decision((31, 32), 1, 0, (33, 34)),
]
FIRST, LAST = (10, 20, 30), (40, 41, 34)


def rounds_ahead(drafter: ModelDrafter) -> list[list[int]]:
    """Three requests, in two rounds; their outputs then."""
    outputs = [[token] for token in FIRST]
    for state in STATES:
        state.pending = ()
    for decisions in ([plain(token) for token in FIRST], DECISIONS):
        requests = [
            record(state, output, row=row)
            for row, (state, output) in enumerate(zip(STATES, outputs, strict=True))
        ]
        drafter.draft(Round(BATCH, requests))
        decide(drafter, requests, *decisions)
        for r, output, decision in zip(requests, outputs, decisions, strict=True):
            output += decision.accept_tokens
            r.state.pending = decision.pending
    return outputs


def next_round(outputs, states, rows) -> Round:
    return Round(
        BATCH,
        [
            record(state, outputs[row], row=row, window=6)
            for state, row in zip(states, rows, strict=True)
        ],
    )


def test_the_next_drafts_first_step_runs_before_its_round():
    """Red if a device waits for the scheduler before it drafts, or drafts behind
    another request's text."""
    drafter = make_drafter(runs_ahead=True)
    outputs = rounds_ahead(drafter)
    *_, one, two = drafter.model.batches
    # The last token of a draft that was kept whole has no KV yet.
    assert [b.input_ids.tolist() for b in (one, two)] == [[14, 41, 34], [*LAST]]
    assert [b.positions.tolist() for b in (one, two)] == [[8, 6, 8], [9, 6, 8]]
    assert two.out_cache_loc.tolist() == [9, 106, 208]
    for rows in ((0, 1, 2), (2, 0)):
        first = drafter._first
        num = len(drafter.model.batches)
        round = next_round(outputs, [STATES[row] for row in rows], rows)
        drafter.draft(round)
        drafted = [
            r.draft.tokens[len(STATES[row].pending)]
            for r, row in zip(round, rows, strict=True)
        ]
        assert drafted == [LAST[row] + 1 for row in rows]
        # The second step is the first one of the round.
        assert drafter.model.batches[num].input_ids.tolist() == drafted
        drafter._first = first


@pytest.mark.parametrize("changed", ["begins anew", "joins", "goes on elsewhere"])
def test_a_first_step_of_another_text_is_left_aside(changed):
    """Red if a request that was retracted, or one that has come, drafts behind a text
    that is not its own."""
    drafter = make_drafter(runs_ahead=True)
    outputs, states, rows = rounds_ahead(drafter), list(STATES), [0, 1, 2]
    if changed == "begins anew":
        states[0] = make_state()
    elif changed == "joins":
        states, rows, outputs = [*states, make_state()], [0, 1, 2, 3], [*outputs, [50]]
    else:
        outputs[1].append(51)
    num = len(drafter.model.batches)
    round = next_round(outputs, states, rows)
    drafter.draft(round)
    last = [r.tokens[-1] if not r.state.pending else 34 for r in round]
    drafted = [r.draft.tokens[len(r.state.pending)] for r in round]
    assert drafted == [token + 1 for token in last]
    assert drafter.model.batches[num].mode.is_extend()


def test_no_step_runs_ahead_of_what_may_not_come():
    """Red if a trial, a round without drafts, or a device that is the host pays for
    it, or if it writes where a request has no slot."""
    for runs_ahead in (True, False):
        drafter, state = make_drafter(runs_ahead=runs_ahead), make_state()
        for asked, seen in ((1, 0), (1, 1), (0, 0), (1, 0), (1, 1)):
            r = record(state, [4], asked=bool(asked))
            drafter.draft(Round(BATCH, [r]))
            decide(drafter, [r], plain(9))
            assert (drafter._first is not None) == bool(seen and runs_ahead)
    drafter = make_drafter(runs_ahead=True)
    for allocated in (95, 95, 5):
        drafted = drafter._first is not None
        r = record(state, [4])
        r.req.kv.kv_allocated_len = allocated
        drafter.draft(Round(BATCH, [r]))
        decide(drafter, [r], Decision((5, 9), 1, 0, ()))
    assert drafted and drafter._first is None
    # Others wrote behind its draft: it has more to read than a step or two.
    drafter.draft(Round(BATCH, [r := record(state, [4])]))
    decide(drafter, [r], Decision((5, 6, 7, 8, 20, 40), 5, 0, ()))
    assert drafter._first is None


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
