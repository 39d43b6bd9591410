"""A head as a drafter: what it is told of the target's passes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_parse.drafting.drafter import DrafterResources, Prefill, PrefillRequest
from sglang_parse.drafting.head import MOST_UNREAD, HeadDrafter
from sglang_parse.drafting.head_model import HeadHint
from sglang_parse.engine.shown import lay_out
from sglang_parse.judging.decide import Decision
from sglang_parse.requests.draft import Draft
from sglang_parse.requests.round_records import Kept, RequestRound, Round, Segments
from sglang_parse.requests.state import RequestState
from sglang_parse.sgl.ranks import Ranks
from sglang_parse.verify.output import PassOutput
from tests.support.counting import CountingHead

TABLE = 100 * torch.arange(4)[:, None] + torch.arange(40)
ALONE = Ranks(SimpleNamespace(world_size=1))


def hint(token: int, chance: float = 0.9) -> HeadHint:
    return HeadHint(torch.tensor(token), torch.zeros(1), torch.tensor(chance))


def read_features(ids, *, row, start, scratch, table):
    """Of a target whose hidden state at a position is its token and a half."""
    assert table is TABLE and row == 1 and len(scratch) == len(ids)
    return torch.tensor(ids)[:, None] + 0.5


class Slots:
    """`room` scratch slots; notes those that are out."""

    table = TABLE
    page_size = 1

    def __init__(self, room: int = 100) -> None:
        self.room = room
        self.out = 0

    def num_free(self, tree_cache) -> int:
        return self.room

    def take_scratch(self, tree_cache, num: int):
        self.out += num
        return torch.arange(num)

    def release_scratch(self, slots) -> None:
        self.out -= len(slots)


def make_drafter(slots: Slots | None = None) -> HeadDrafter:
    head = CountingHead()
    head.check_room = lambda: None
    config = SimpleNamespace(adaptive=True)
    drafter = HeadDrafter(head, 4, SimpleNamespace(ranks=ALONE, config=config))
    drafter.open(DrafterResources(slots or Slots(), 400, read_features))
    return drafter


def make_state(*, compose: bool = True, stop: int = -1, **more) -> RequestState:
    options = SimpleNamespace(compose=compose)
    return RequestState(options, frozenset({stop}), None, report=None, **more)


def record(
    state: RequestState, row: int, seq_len: int, *, most: int = 100, **more
) -> RequestRound:
    """most: new tokens that the request asks for."""
    req = SimpleNamespace(sampling_params=SimpleNamespace(max_new_tokens=most))
    return RequestRound(req, state, row, seq_len, 1, output_len=1, **more)


# What the head wrote itself, so that it reads what became of it at once.
OWN = Draft(parts=(("eagle3", 1),))


def num_known(drafter: HeadDrafter, row: int, num: int = 10) -> int:
    return drafter.flags.num_leading([TABLE[row, :num]])[0]


def test_drafts_stop_at_the_end_of_the_response():
    """Red if the head writes past a stop token, for a request without a hint, or for
    one whose turn it is not."""
    drafter = make_drafter()
    states = [make_state(stop=7), make_state(), make_state()]
    drafter._of(states[0]).hint, drafter._of(states[2]).hint = hint(5), hint(20)
    round = Round(None, [record(s, row, 3) for row, s in enumerate(states)])
    for r, num in zip(round, (4, 4, 0), strict=True):
        r.budgets = {"eagle3": num} if num else {"model": 4}
    drafter.draft(round)
    first, *others = round
    assert (first.draft.tokens, first.draft.ended) == ((5, 6), True)
    assert (first.draft.num_token_level, first.draft.parts) == (2, (("eagle3", 2),))
    assert [r.draft for r in others] == [Draft()] * 2


def test_it_writes_only_where_it_has_a_hint_and_no_grammar_binds():
    """Red if the planner gives the head a turn that it cannot take."""
    drafter, known = make_drafter(), make_state()
    drafter._of(known).hint = hint(5)
    assert drafter.can_draft(record(known, 0, 3))
    assert not drafter.can_draft(record(known, 0, 3, grammar=object()))
    assert not drafter.can_draft(record(make_state(), 0, 3))
    known.failed_drafters.add("eagle3")
    assert not drafter.can_draft(record(known, 0, 3))


def pass_of(width: int = 1) -> PassOutput:
    rows = torch.arange(40.0)[:, None].repeat(1, width)
    return PassOutput(rows, torch.zeros(0), rows)


def test_requests_without_the_head_leave_no_trace():
    """Red if a slot is taken to hold the head's KV that it never wrote."""
    drafter = make_drafter()
    with_head, without, waiting = make_state(), make_state(compose=False), make_state()
    drafter.flags.mark(TABLE, [(row, 0, 40, 40) for row in range(3)])
    requests = [
        record(s, i, 2, draft=OWN) for i, s in enumerate((with_head, without, waiting))
    ]
    for r, tokens in zip(requests, ((5, 6), (5, 6), ()), strict=True):
        r.kept = Kept(decision=Decision(tokens, 0, 0, ()))
    drafter.after_pass(Round(None, requests, output=pass_of()))
    assert drafter._of(with_head).hint.token.item() == 7
    assert drafter._of(without).hint is None and drafter._of(waiting).hint is None
    assert [num_known(drafter, row) for row in range(3)] == [10, 2, 10]


def prompt_of(ids: list[int], ask=None) -> SimpleNamespace:
    params = SimpleNamespace(custom_params=ask)
    return SimpleNamespace(origin_input_ids=ids, output_ids=[], sampling_params=params)


def prefill(
    drafter: HeadDrafter, *, prefix: int, ids: list[int], ask=None, last=True
) -> HeadHint | None:
    """The hint behind a prefill that has `prefix` tokens cached; last: whether it ends
    the prompt."""
    req = prompt_of(ids, ask)
    extend = (len(ids) if last else len(ids) - 1) - prefix
    state = make_state() if last else None
    batch = SimpleNamespace(
        tree_cache=None, out_cache_loc=TABLE[1, prefix : prefix + extend]
    )
    one = PrefillRequest(req, state, 1, num_cached=prefix, num_computed=extend)
    now = Prefill(batch, [one])
    drafter.before_prefill(now)
    features = torch.arange(1.0, extend + 1)[:, None]
    drafter.after_prefill(now, features, torch.tensor([50]))
    assert drafter.slots.out == 0
    return drafter._of(state).hint if state is not None else None


def test_prefill_pairs_each_position_with_the_token_after_it():
    """Red if the head's pairs are shifted by one, or a chunk ends with a wrong one."""
    drafter = make_drafter()
    found = prefill(drafter, prefix=0, ids=[11, 12, 13])
    batches = drafter.head.batches
    assert batches[0].input_ids.tolist() == [12, 13, 50]
    assert found.token.item() == 51
    prefill(drafter, prefix=1, ids=[11, 12, 13, 14], last=False)
    assert batches[1].input_ids.tolist() == [13, 14]


def test_cached_prefix_without_the_heads_kv_is_computed_again():
    """Red if the head attends to KV that was never written, is given another position's
    hidden states, writes over what is good, or works twice where it worked before."""
    drafter = make_drafter()
    ids = list(range(10, 22))
    drafter.flags.mark(TABLE, [(1, 0, 2, 2), (1, 6, 8, 8)])
    prefill(drafter, prefix=10, ids=ids)
    batches = drafter.head.batches
    positions = [b.positions.tolist() for b in batches]
    assert positions == [[2, 3, 4, 5], [8, 9], [10, 11]]
    assert [b.input_ids.tolist() for b in batches][1:] == [[19, 20], [21, 50]]
    states = [b.spec_info.hidden_states.flatten().tolist() for b in batches]
    assert states == [[12.5, 13.5, 14.5, 15.5], [18.5, 19.5], [1, 2]]
    assert num_known(drafter, 1, 12) == 12
    prefill(drafter, prefix=10, ids=ids)
    assert len(batches) == 4
    assert prefill(drafter, prefix=0, ids=ids, ask={"parse_compose": False}) is None
    assert num_known(drafter, 1, 12) == 0
    prefill(drafter, prefix=10, ids=ids, ask={"parse_compose": False})
    assert len(batches) == 4


@pytest.mark.parametrize(("prefix", "room"), [(9, 100), (8, 7)])
def test_head_is_left_out_where_a_gap_is_too_long(prefix, room):
    """Red if one step reads more than a prefill's worth again or more than there are
    slots for, or if the head's KV of later tokens is taken to be good."""
    drafter = make_drafter(Slots(room))
    drafter.flags.mark(TABLE, [(1, 8, 12, 12)])
    drafter.flags.forget(TABLE[1, :prefix])
    found = prefill(drafter, prefix=prefix, ids=list(range(10, 22)))
    assert drafter.head.batches == [] and found is None
    assert num_known(drafter, 1, 12) == 0
    assert drafter.flags.num_leading([TABLE[1, prefix:12]]) == [0]


def test_what_was_left_out_at_its_prefill_stays_out():
    """Red if the head goes along with a request whose prompt it lacks: its KV would
    count as good for whoever shares that prefix."""
    drafter = make_drafter(Slots(room=7))
    req = prompt_of(list(range(10, 22)))
    state = make_state()
    batch = SimpleNamespace(tree_cache=None, out_cache_loc=TABLE[1, 8:12])
    now = Prefill(batch, [PrefillRequest(req, state, 1, 8, 4)])
    drafter.before_prefill(now)
    drafter.after_prefill(now, None, torch.tensor([50]))  # nothing was to be computed
    drafter.flags.mark(TABLE, [(1, 0, 40, 40)])
    r = record(state, 1, 12, kept=Kept(decision=Decision((50, 51), 0, 0, ())))
    drafter.after_pass(Round(None, [r], output=pass_of()))
    assert drafter.head.batches == [] and not drafter.can_draft(r)
    assert num_known(drafter, 1, 40) == 12


def test_head_reads_nothing_again_for_a_verdict():
    """Red if a request that generates nothing has cached tokens computed again; but
    what it prefills itself the head may have."""
    drafter = make_drafter()
    ids, ask = list(range(10, 22)), {"parse_verify": ["x"]}
    prefill(drafter, prefix=10, ids=ids, ask=ask)
    assert drafter.head.batches == []
    prefill(drafter, prefix=0, ids=ids, ask=ask)
    assert num_known(drafter, 1, 12) == 12


def test_several_gaps_share_one_prefills_worth():
    """Red if a batch of requests with gaps makes a step longer by each of them."""
    drafter = make_drafter()
    reqs = []
    for row, num_missing in ((0, 5), (1, 4), (2, 3)):
        req = prompt_of(list(range(10, 16)))
        reqs.append(PrefillRequest(req, make_state(), row, 5, 1))
        drafter.flags.mark(TABLE, [(row, num_missing, 6, 6)])  # lacks the first
    read = []
    drafter.features_of = lambda ids, *, row, **_: (
        read.append(row) or torch.zeros(len(ids), 1)
    )
    batch = SimpleNamespace(tree_cache=None, out_cache_loc=TABLE[:3, 5])
    drafter.before_prefill(Prefill(batch, reqs))
    # Eight tokens are a prefill here: 5 and then 3 of them.
    assert read == [0, 2] and drafter._whole == {0, 2}


def test_head_follows_the_hidden_states_of_kept_rows_alone():
    """Red if it is given a suffix row's, or another request's."""
    drafter = make_drafter()
    states = [make_state(), make_state()]
    suffixes = ((8,) * 4, (9,) * 4)
    for state, suffix in zip(states, suffixes, strict=True):
        state.judge = SimpleNamespace(suffix=suffix)
    first, second = Draft((3, 4, 5), parts=OWN.parts), Draft((6, 7), parts=OWN.parts)
    first = record(states[0], 1, 5, draft=first, segments=Segments((2, 3)))
    second = record(states[1], 2, 9, draft=second, segments=Segments((1, 2)))
    round = Round(None, [first, second], output=pass_of())
    lay_out(round)
    first.kept = Kept(decision=Decision((3, 4, 20), 2, 0, ()))
    second.kept = Kept(decision=Decision((30,), 0, 0, ()))
    assert second.root_row == 1 + 3 + 2 * 4  # behind the first one's suffixes
    drafter.after_pass(round)
    (batch,) = drafter.head.batches
    assert batch.spec_info.hidden_states.flatten().tolist() == [0, 1, 2, 12]
    assert batch.input_ids.tolist() == [3, 4, 20, 30]
    assert batch.positions.tolist() == [5, 6, 7, 9]
    assert batch.rows.tolist() == [1, 2]


def follow(drafter: HeadDrafter, r: RequestRound, tokens: tuple[int, ...]) -> None:
    """A pass in which the target decided for `tokens`, a float of features each."""
    r.kept = Kept(decision=Decision(tokens, 0, 0, ()))
    output = pass_of()
    drafter.after_pass(Round(None, [r], output=output))
    output.features.zero_()  # the next pass of a captured graph writes into it


def test_a_head_that_does_not_draft_reads_later_and_all_at_once():
    """Red if every plain round pays for the head, if it drafts from an old hint, or if
    what it lacks counts as known."""
    drafter, state = make_drafter(), make_state()
    prefill(drafter, prefix=0, ids=[11, 12])
    drafter._of(state).hint = hint(50)
    drafter.head.batches.clear()
    for at, token in enumerate((21, 22, 23)):
        r = record(state, 1, 2 + at)
        r.root_row = at
        follow(drafter, r, (token,))
    assert drafter.head.batches == [] and num_known(drafter, 1) == 2
    r = record(state, 1, 5)
    assert drafter.can_draft(r)
    r.budgets = {"eagle3": 2}
    drafter.draft(Round(None, [r]))
    first = drafter.head.batches[0]
    assert first.positions.tolist() == [2, 3, 4]
    assert first.input_ids.tolist() == [21, 22, 23]
    assert first.spec_info.hidden_states.flatten().tolist() == [0, 1, 2]
    assert r.draft.tokens == (24, 25) and num_known(drafter, 1) == 5


class Cuts:
    """Goes on with chains whose first token is likelier than 0.5. It shows one token
    less than there are, and none of a chain whose first is hardly likelier."""

    def starts(self, chances, steps):
        return [chance > 0.5 for chance in chances]

    def choose(self, chances):
        return [len(one) - 1 if one[0] > 0.6 else 0 for one in chances]


def test_chains_are_cut_where_the_head_is_unsure():
    """Red if an unsure head costs steps or rows, or a chain's last token is kept."""
    drafter, states = make_drafter(), [make_state() for _ in range(3)]
    for state, chance in zip(states, (0.9, 0.2, 0.55), strict=True):
        drafter._of(state).hint = hint(5, chance)
    round = Round(None, [record(s, row, 3) for row, s in enumerate(states)])
    round.chains = Cuts()
    for r in round:
        r.budgets = {"eagle3": 4}
    drafter.draft(round)
    sure, unsure, hardly = round
    assert sure.draft.tokens == (5, 6, 7) and len(sure.chances) == 3
    assert sure.chances[0] == pytest.approx(0.9)
    assert unsure.draft == hardly.draft == Draft()
    assert unsure.chances == hardly.chances == ()
    assert {len(b.input_ids) for b in drafter.head.batches} == {2}


def test_ranks_cut_chains_as_the_first_of_them_does():
    """Red if a rank that would cut a chain elsewhere, or not at all, sends other
    numbers of tokens than the first: the collective ends the server."""
    told, found = [], []
    for chains in (Cuts(), None):
        drafter, state = make_drafter(), make_state()
        drafter._of(state).hint = hint(5)
        sent = iter([list(lists) for lists in told])

        def agree(lists, first=chains, sent=sent):
            if first is not None:
                told.append(lists)
                return lists
            theirs = next(sent)
            assert [len(one) for one in theirs] == [len(one) for one in lists]
            return theirs

        drafter.ranks = SimpleNamespace(agree_all=agree)
        round = Round(None, [record(state, 0, 3)])
        round.chains, round.requests[0].budgets = chains, {"eagle3": 4}
        drafter.draft(round)
        found.append(round.requests[0].draft.tokens)
    assert found == [(5, 6, 7)] * 2


def test_a_head_is_never_far_behind():
    """Red if hidden states of a whole answer pile up in memory."""
    drafter, state = make_drafter(), make_state()
    for at in range(MOST_UNREAD + 2):
        follow(drafter, record(state, 1, 2 + at), (7,))
    assert [len(b.input_ids) for b in drafter.head.batches] == [MOST_UNREAD + 1]
    assert drafter._of(state).num_unread == 1


@pytest.mark.parametrize("ends", ["stop token", "length"])
def test_a_finished_request_leaves_no_gap(ends):
    """Red if the next turn's cached prefix lacks the head's KV of the answer's end."""
    drafter, state = make_drafter(), make_state(stop=9)
    drafter.flags.mark(TABLE, [(1, 0, 2, 2)])
    follow(drafter, record(state, 1, 2), (7,))
    follow(drafter, record(state, 1, 3), (7,))
    last = (7, 9) if ends == "stop token" else (7, 7)
    follow(drafter, record(state, 1, 4, most=3), last)
    assert num_known(drafter, 1) == 6
    assert [len(b.input_ids) for b in drafter.head.batches] == [4]


def test_a_request_without_a_hint_has_one_after_its_first_round():
    """Red if the head, whose prompt was cached whole, never gets to draft."""
    drafter, state = make_drafter(), make_state()
    r = record(state, 1, 2)
    assert not drafter.can_draft(r)
    follow(drafter, r, (7,))
    assert drafter.can_draft(r)
    r.budgets = {"eagle3": 1}
    drafter.draft(Round(None, [r]))
    assert r.draft.tokens == (8,)


def test_a_resting_head_reads_nothing_and_has_gaps_afterwards():
    """Red if a head that does not pay costs a forward, drafts from what it knew before
    its rest, or takes slots of that time to hold its KV."""
    drafter, state = make_drafter(), make_state()
    ids = [11, 12, 13]
    prefill(drafter, prefix=0, ids=ids)
    drafter._of(state).hint = hint(50)
    drafter.head.batches.clear()
    drafter.flags.mark(TABLE, [(1, 0, 40, 40)])
    r = record(state, 1, 3, kept=Kept(decision=Decision((50, 51), 0, 0, ())))
    drafter.after_pass(Round(None, [r], output=pass_of(), head_rests=True))
    assert not drafter.can_draft(r) and num_known(drafter, 1) == 3
    assert prefill(drafter, prefix=0, ids=ids) is None
    assert drafter.head.batches == [] and num_known(drafter, 1) == 0
    drafter.after_pass(Round(None, [], output=pass_of()))  # awake again
    r = record(state, 1, 5)
    follow(drafter, r, (7,))
    assert not drafter.can_draft(r)  # it lacks what came in between
    assert prefill(drafter, prefix=0, ids=ids) is not None
