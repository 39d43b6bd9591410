"""The torch attention equals a row-by-row softmax over the visible columns.

Tolerance 1e-5 in float32: the same sums in another order.
"""

import random
from dataclasses import dataclass

import pytest
import torch

from sglang_parse.cpu.tiles import (
    AttentionTile,
    attend,
    group_alike,
    plan_decode,
    plan_tiles,
)
from sglang_parse.verify.layout import PassRequest, RowVisibility, build_verify_plan
from tests.support.reference import attention, verify_mask

Request = tuple[int, int, tuple[int, ...], int]  # seq_len, num_draft, cuts, suffix_len

HEADS, KV_HEADS, DIM, V_DIM, SCALING = 4, 2, 8, 6, 0.35
NUM_SLOTS = 400
ALIKE: list[Request] = [(6, 4, (2, 4), 2), (5, 4, (3,), 3), (7, 3, (1, 2), 2)]
UNLIKE: list[Request] = [
    (90, 6, (2, 4), 3),
    (2, 0, (), 0),
    (3, 0, (), 0),
    (40, 1, (), 2),
]


@dataclass
class Pass:
    """One verify pass over a random pool."""

    requests: list[Request]
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    visibility: RowVisibility
    qo_lens: list[int]
    kv_index: list[torch.Tensor]

    def tiles(self, dtype: torch.dtype = torch.float32) -> list[AttentionTile]:
        return plan_tiles(
            visibility=self.visibility,
            qo_lens=self.qo_lens,
            kv_index=self.kv_index,
            dtype=dtype,
        )

    def run(self) -> torch.Tensor:
        return attend(
            q=self.q,
            k_cache=self.k,
            v_cache=self.v,
            tiles=self.tiles(),
            scaling=SCALING,
        )

    def oracle(self) -> torch.Tensor:
        out = []
        row = 0
        for request, qo_len, index in zip(
            self.requests, self.qo_lens, self.kv_index, strict=True
        ):
            out += attention(
                self.q[row : row + qo_len].tolist(),
                self.k[index.long()].tolist(),
                self.v[index.long()].tolist(),
                verify_mask(*request),
                SCALING,
            )
            row += qo_len
        return torch.tensor(out)


def make_pass(requests: list[Request], heads: int = HEADS, seed: int = 0) -> Pass:
    plan = build_verify_plan(
        [PassRequest(n, 0, [0] * d, cuts, (0,) * v) for n, d, cuts, v in requests]
    )
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    slots = list(range(1, NUM_SLOTS))
    random.Random(seed).shuffle(slots)
    kv_index = []
    for n in plan.kv_lens:
        kv_index.append(torch.tensor(slots[:n], dtype=torch.int32))
        del slots[:n]
    return Pass(
        requests,
        randn(plan.num_verify_tokens, heads, DIM),
        randn(NUM_SLOTS, KV_HEADS, DIM),
        randn(NUM_SLOTS, KV_HEADS, V_DIM),
        plan.visibility,
        list(plan.qo_lens),
        kv_index,
    )


@pytest.mark.parametrize("heads", [KV_HEADS, HEADS], ids=["mha", "gqa"])
@pytest.mark.parametrize(
    "requests", [ALIKE, UNLIKE, ALIKE[:1]], ids=["padded", "split", "one"]
)
def test_attend_equals_oracle(requests, heads):
    """Red if a mask, a padding row or a KV head is taken from somewhere else."""
    p = make_pass(requests, heads)
    torch.testing.assert_close(p.run(), p.oracle(), atol=1e-5, rtol=0)


def test_alike_requests_share_a_tile_and_unlike_ones_do_not():
    """Red if the two cases above stop covering both paths."""
    assert len(make_pass(ALIKE).tiles()) == 1
    assert len(make_pass(UNLIKE).tiles()) > 1


def test_groups_hold_every_request_once_and_pad_little():
    """Red if a request is lost, or a short one is padded to a far longer one."""
    qo_lens, kv_lens = [1, 90, 3, 1, 88, 300, 2], [50, 170, 60, 9000, 180, 700, 55]
    groups = group_alike(qo_lens, kv_lens)
    assert sorted(sum(groups, [])) == list(range(7))
    alike = {tuple(g) for g in groups}
    assert {(1, 4), (3,), (5,)} <= alike, groups


def test_nan_in_slots_of_others_does_not_spread():
    """Red if padding columns or masked columns of other requests enter a sum.

    Freed slots keep whatever was there: a NaN in one must stay there.
    """
    p = make_pass(ALIKE)
    clean = p.run()
    used = torch.cat(p.kv_index).long()
    unused = torch.ones(NUM_SLOTS, dtype=torch.bool)
    unused[used] = False
    unused[0] = False  # the padding slot, which SGLang keeps finite
    p.k[unused] = float("nan")
    p.v[unused] = float("nan")
    assert torch.equal(p.run(), clean)


def test_garbage_in_the_padding_slot_changes_nothing():
    """Red if slot 0, with which ragged rows are padded, is ever attended."""
    p = make_pass(ALIKE)
    clean = p.run()
    p.k[0] = 1e4
    p.v[0] = 1e4
    torch.testing.assert_close(p.run(), clean, atol=1e-6, rtol=0)


def test_cache_in_lower_precision_is_read_in_the_query_dtype():
    """Red if an fp16 KV cache makes the product fail or run in fp16."""
    p = make_pass(ALIKE)
    p.k, p.v = p.k.half(), p.v.half()
    out = p.run()
    p.k, p.v = p.k.float(), p.v.float()
    torch.testing.assert_close(out, p.run(), atol=1e-6, rtol=0)


def test_decode_batch_needs_no_row_copies():
    """Red if a plain decode step of equal lengths builds masks it does not need."""
    tiles = plan_tiles(
        visibility=RowVisibility.causal(torch.tensor([4, 4])),
        qo_lens=[1, 1],
        kv_index=[torch.arange(5), torch.arange(5, 10)],
        dtype=torch.float32,
    )
    assert len(tiles) == 1
    assert tiles[0].q_index is None
    assert tiles[0].bias is None
    assert tiles[0].kept is None


@pytest.mark.parametrize("lens", [(7, 7), (5, 12, 1)], ids=["equal", "ragged"])
def test_decode_tile_equals_the_general_plan(lens):
    """Red if a decode step's shortcut sees other columns than the general plan, or
    stale slots behind a request's length, which may hold anything."""
    generator = torch.Generator().manual_seed(3)
    q = torch.randn(len(lens), HEADS, DIM, generator=generator)
    k = torch.randn(NUM_SLOTS, KV_HEADS, DIM, generator=generator)
    v = torch.randn(NUM_SLOTS, KV_HEADS, V_DIM, generator=generator)
    slots = 1 + torch.randperm(NUM_SLOTS - 1, generator=generator).int()
    table, stale = torch.zeros(9, 40, dtype=torch.int32), slots[100:]
    table[:] = stale[0]
    rows = torch.tensor([6, 2, 4][: len(lens)])
    kv_index = []
    for row, n in zip(rows.tolist(), lens, strict=True):
        kv_index.append(slots[row * 13 : row * 13 + n])
        table[row, :n] = kv_index[-1]
    k[stale.long()] = v[stale.long()] = float("nan")

    def run(tiles: list[AttentionTile]) -> torch.Tensor:
        return attend(q=q, k_cache=k, v_cache=v, tiles=tiles, scaling=SCALING)

    general = plan_tiles(
        visibility=RowVisibility.causal(torch.tensor(lens) - 1),
        qo_lens=[1] * len(lens),
        kv_index=kv_index,
        dtype=torch.float32,
    )
    tile = plan_decode(
        table=table, rows=rows, kv_lens=torch.tensor(lens), dtype=torch.float32
    )
    torch.testing.assert_close(run([tile]), run(general), atol=1e-6, rtol=0)
    assert not run([tile]).isnan().any()
