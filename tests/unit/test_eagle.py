"""The EAGLE-3 head's chain and what it is told of the target's passes."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_parse.decide import Decision
from sglang_parse.draft_cache import DraftCache
from sglang_parse.drafters import FollowUp, HeadDrafter, Turn
from sglang_parse.eagle import ChainRequest, EagleHead, HeadHint, HeadRows
from sglang_parse.plan import build_verify_plan
from sglang_parse.ranks import Ranks
from sglang_parse.state import RoundDraft
from sglang_parse.verify import PassOutput
from sglang_parse.worker import follow_ups

VOCAB = 64
TABLE = 100 * torch.arange(4)[:, None] + torch.arange(40)


class CountingHead(EagleHead):
    """Its next token is its input's plus one, its hidden state the sum of both; keeps
    every batch it was asked to run."""

    def __init__(self) -> None:
        self.hot_token_id = None
        self.layout = None
        self.longest_prefill = 8
        self.runner = SimpleNamespace(dtype=torch.float32)
        self.batches: list[SimpleNamespace] = []

    def _forward_batch(self, mode, **fields) -> SimpleNamespace:
        return SimpleNamespace(mode=mode, **fields)

    def _forward(self, batch: SimpleNamespace) -> SimpleNamespace:
        self.batches.append(batch)
        last = torch.arange(len(batch.rows))
        if batch.mode.is_extend():
            last = torch.cumsum(batch.extend_seq_lens, 0) - 1
        tokens = batch.input_ids[last]
        logits = torch.zeros(len(batch.rows), VOCAB)
        logits[torch.arange(len(batch.rows)), (tokens + 1) % VOCAB] = 1.0
        hidden = batch.spec_info.hidden_states[last, :1] + tokens[:, None]
        return SimpleNamespace(next_token_logits=logits, hidden_states=hidden)


@pytest.fixture(autouse=True)
def one_rank(monkeypatch):
    from contextlib import nullcontext

    from sglang_parse import eagle

    monkeypatch.setattr(eagle, "draft_tp_context", lambda _: nullcontext())
    monkeypatch.setattr(eagle, "draft_pp_context", nullcontext)


def hint(token: int, hidden: float = 0.0) -> HeadHint:
    return HeadHint(torch.tensor(token), torch.tensor([hidden]))


def test_chain_is_fed_its_own_tokens_and_hidden_states():
    """Red if a step reads the hidden state of another step, or writes its KV at
    another position than the token before it."""
    head = CountingHead()
    orders = [ChainRequest(1, 10, 4, hint(5, 0.5)), ChainRequest(3, 20, 2, hint(30))]
    assert head.propose(orders, TABLE) == [(5, 6, 7, 8), (30, 31)]
    steps = head.batches
    assert [b.input_ids.tolist() for b in steps] == [[5, 30], [6, 31], [7, 32]]
    assert [b.positions.tolist() for b in steps] == [[10, 20], [11, 20], [12, 20]]
    assert [b.out_cache_loc.tolist() for b in steps] == [
        [110, 320], [111, 320], [112, 320],
    ]  # fmt: skip
    states = [b.spec_info.hidden_states[0].item() for b in steps]
    assert states == [0.5, 5.5, 11.5]


def test_chain_of_one_needs_no_forward():
    """Red if the token at hand is computed again."""
    head = CountingHead()
    assert head.propose([ChainRequest(0, 3, 1, hint(9))], TABLE) == [(9,)]
    assert head.batches == []


def test_reduced_vocabulary_is_mapped_back():
    """Red if a head with its own vocabulary (d2t) drafts its own ids."""
    head = CountingHead()
    head.hot_token_id = torch.arange(VOCAB) * 10
    rows = [HeadRows(0, 2, [3, 4], torch.zeros(2, 6))]
    assert head.follow(rows, TABLE)[0].token.item() == 50


def test_follow_is_one_ragged_pass_over_the_kept_rows():
    """Red if a position is forwarded with another position's token or features."""
    head = CountingHead()
    rows = [
        HeadRows(1, 4, [7, 8, 9], torch.tensor([[1.0], [2.0], [3.0]])),
        HeadRows(2, 0, [5], torch.tensor([[4.0]])),
    ]
    hints = head.follow(rows, TABLE)
    (batch,) = head.batches
    assert batch.input_ids.tolist() == [7, 8, 9, 5]
    assert batch.positions.tolist() == [4, 5, 6, 0]
    assert batch.out_cache_loc.tolist() == [104, 105, 106, 200]
    assert batch.seq_lens.tolist() == [7, 1]
    assert batch.extend_prefix_lens.tolist() == [4, 0]
    assert batch.spec_info.hidden_states.flatten().tolist() == [1, 2, 3, 4]
    assert [h.token.item() for h in hints] == [10, 6]
    assert [h.hidden.item() for h in hints] == [12.0, 9.0]


def read_features(ids, *, row, start, scratch, table):
    """Of a target whose hidden state at a position is its token and a half."""
    assert table is TABLE and row == 1 and len(scratch) == len(ids)
    return torch.tensor(ids)[:, None] + 0.5


class Slots:
    """`room` scratch slots; notes those that are out."""

    table = TABLE

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


ALONE = Ranks(SimpleNamespace(world_size=1))


def drafter(slots: Slots | None = None) -> HeadDrafter:
    cache = DraftCache(400, "cpu")
    return HeadDrafter(CountingHead(), slots or Slots(), cache, read_features, ALONE)


def state(*, compose: bool = True, known: HeadHint | None = None, stop: int = -1):
    options = SimpleNamespace(compose=compose)
    return SimpleNamespace(options=options, hint=known, stop_ids=frozenset({stop}))


def test_drafts_stop_at_the_end_of_the_response():
    """Red if the head writes past a stop token, or for a request without a hint."""
    head = drafter()
    states = [state(known=hint(5), stop=7), state(), state(known=hint(20))]
    batch = SimpleNamespace(req_pool_indices=torch.tensor([0, 1, 2]))
    turn = Turn(batch, states, [3, 3, 3], [4, 4, 0], [4, 4, 0], [None] * 3)
    drafts = head.draft(turn, [RoundDraft()] * 3)
    assert drafts == [RoundDraft((5, 6), ended=True, num_head=2), *[RoundDraft()] * 2]


def test_requests_without_the_head_leave_no_trace():
    """Red if a slot is taken to hold the head's KV that it never wrote."""
    head = drafter()
    with_head, without = state(), state(compose=False)
    head.cache.mark(TABLE[:3].flatten(), num_valid=120)
    head.follow(
        [
            FollowUp(0, with_head, 2, (5, 6), torch.ones(2, 1)),
            FollowUp(1, without, 2, (5, 6), torch.ones(2, 1)),
            FollowUp(2, with_head, 2, (), torch.ones(0, 1)),
        ]
    )
    assert with_head.hint.token.item() == 7 and without.hint is None
    assert [head.cache.num_leading(TABLE[i, :10]) for i in range(3)] == [10, 2, 10]


def prefill(head: HeadDrafter, *, prefix: int, ids: list[int], ask=None, last=True):
    req = SimpleNamespace(
        origin_input_ids=ids,
        output_ids=[],
        sampling_params=SimpleNamespace(custom_params=ask),
    )
    extend = (len(ids) if last else len(ids) - 1) - prefix
    batch = SimpleNamespace(
        reqs=[req], req_pool_indices=torch.tensor([1]),
        prefix_lens=[prefix], extend_lens=[extend], tree_cache=None,
        out_cache_loc=TABLE[1, prefix : prefix + extend],
    )  # fmt: skip
    one = state() if last else None
    features = torch.arange(1.0, extend + 1)[:, None]
    whole = head.fill_gaps(batch)
    head.follow_prefill(batch, [one], features, torch.tensor([50]), whole)
    assert head.slots.out == 0
    return one


def test_prefill_pairs_each_position_with_the_token_after_it():
    """Red if the head's pairs are shifted by one, or a chunk ends with a wrong one."""
    head = drafter()
    one = prefill(head, prefix=0, ids=[11, 12, 13])
    assert head.head.batches[0].input_ids.tolist() == [12, 13, 50]
    assert one.hint.token.item() == 51
    prefill(head, prefix=1, ids=[11, 12, 13, 14], last=False)
    assert head.head.batches[1].input_ids.tolist() == [13, 14]


def test_cached_prefix_without_the_heads_kv_is_computed_again():
    """Red if the head attends to KV that was never written, is given another position's
    hidden states, writes over what is good, or works twice where it worked before."""
    head = drafter()
    ids = list(range(10, 22))
    head.cache.mark(TABLE[1, :2], num_valid=2)
    head.cache.mark(TABLE[1, 6:8], num_valid=2)
    prefill(head, prefix=10, ids=ids)
    batches = head.head.batches
    positions = [b.positions.tolist() for b in batches]
    assert positions == [[2, 3, 4, 5], [8, 9], [10, 11]]
    assert [b.input_ids.tolist() for b in batches][1:] == [[19, 20], [21, 50]]
    states = [b.spec_info.hidden_states.flatten().tolist() for b in batches]
    assert states == [[12.5, 13.5, 14.5, 15.5], [18.5, 19.5], [1, 2]]
    assert head.cache.num_leading(TABLE[1, :12]) == 12
    prefill(head, prefix=10, ids=ids)
    assert len(batches) == 4
    assert prefill(head, prefix=0, ids=ids, ask={"parse_compose": False}).hint is None
    assert head.cache.num_leading(TABLE[1, :12]) == 0
    prefill(head, prefix=10, ids=ids, ask={"parse_compose": False})
    assert len(batches) == 4


@pytest.mark.parametrize(("prefix", "room"), [(9, 100), (8, 7)])
def test_head_is_left_out_where_a_gap_is_too_long(prefix, room):
    """Red if one step reads more than a prefill's worth again or more than there are
    slots for, or if the head's KV of later tokens is taken to be good."""
    head = drafter(Slots(room))
    head.cache.mark(TABLE[1, 8:12], num_valid=4)
    head.cache.forget(TABLE[1, :prefix])
    one = prefill(head, prefix=prefix, ids=list(range(10, 22)))
    assert head.head.batches == [] and one.hint is None
    assert head.cache.num_leading(TABLE[1, :12]) == 0
    assert not head.cache.num_leading(TABLE[1, prefix:12])


def test_head_reads_nothing_again_for_a_verdict():
    """Red if a request that generates nothing has cached tokens computed again; but
    what it prefills itself the head may have."""
    head = drafter()
    ids, ask = list(range(10, 22)), {"parse_verify": ["x"]}
    prefill(head, prefix=10, ids=ids, ask=ask)
    assert head.head.batches == []
    prefill(head, prefix=0, ids=ids, ask=ask)
    assert head.cache.num_leading(TABLE[1, :12]) == 12


def test_head_follows_the_hidden_states_of_kept_rows_alone():
    """Red if it is given a suffix row's, or another request's."""
    plan = build_verify_plan(
        seq_lens=[5, 9],
        bonus_tokens=[1, 2],
        draft_tokens=[[3, 4, 5], [6, 7]],
        boundaries=[(2, 3), (1,)],
        suffix_tokens=[[8] * 4, [9] * 4],
    )
    rows = torch.arange(40.0)[:, None]
    output = PassOutput(rows, torch.zeros(0), rows)
    turn = Turn(
        SimpleNamespace(req_pool_indices=torch.tensor([1, 2])),
        [state(), state()], [5, 9], [3, 2], [0, 0], [None] * 2,
    )  # fmt: skip
    decisions = [Decision((3, 4, 20), 2, 0, ()), Decision((30,), 0, 0, ())]
    first, second = follow_ups(turn, decisions, output, plan.root_rows)
    assert plan.root_rows[1] == 1 + 3 + 2 * 4  # behind the first one's suffixes
    assert first.features.flatten().tolist() == [0, 1, 2]
    assert second.features.flatten().tolist() == [12]
    assert (first.row, first.start, second.row, second.start) == (1, 5, 2, 9)
