"""Random verify passes over a KV pool, and what they must compute (for route tests)."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.model_executor.forward_batch_info import ForwardBatch

from sglang_parse.verify.backends.verify_backend import place_slots
from sglang_parse.verify.layout import PassRequest, VerifyPlan, build_verify_plan
from tests.support.reference import (
    attention,
    verify_mask,
    verify_positions,
    window_mask,
)

#: seq_len, num_draft, cuts, suffix_len
Request = tuple[int, int, tuple[int, ...], int]

HEADS, KV_HEADS, DIM, SCALING = 4, 2, 16, 0.3
ROW_WIDTH = 48


def random_request(rng: random.Random) -> Request:
    num_draft = rng.choice([0, 1, 2, 5, 13])
    num_cuts = rng.randint(0, min(num_draft, 4))
    cuts = tuple(sorted(rng.sample(range(1, num_draft + 1), num_cuts)))
    return rng.randint(1, 20), num_draft, cuts, rng.randint(1, 5)


def plan_of(requests: list[Request]) -> VerifyPlan:
    """The layout of a pass over requests whose tokens do not matter."""
    return build_verify_plan(
        [
            PassRequest(
                seq_len=seq_len,
                bonus_token=0,
                draft_tokens=[1] * num_draft,
                boundaries=cuts,
                suffix=[2] * suffix_len,
            )
            for seq_len, num_draft, cuts, suffix_len in requests
        ]
    )


@dataclass
class Pass:
    """A pass whose slots lie anywhere in the pool; slot 0 is never used.

    q: [tokens, heads, dim]; k, v: the pool, [slots, kv_heads, dim], in which the rows
    the pass writes are already written.
    """

    requests: list[Request]
    plan: VerifyPlan
    rows: list[int]
    table: torch.Tensor
    slots: list[torch.Tensor]
    written: torch.Tensor
    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor

    def to(self, device: str, dtype: torch.dtype) -> Pass:
        """The same pass elsewhere; attention inputs rounded to `dtype`."""
        moved = {
            name: getattr(self, name).to(device) for name in ("table", "written")
        } | {name: getattr(self, name).to(device, dtype) for name in ("q", "k", "v")}
        slots = [s.to(device) for s in self.slots]
        return replace(self, slots=slots, **moved)

    def oracle(
        self, window: int | None = None, sinks: list[float] | None = None
    ) -> torch.Tensor:
        """[tokens, heads, dim], by nested loops over each request's own mask."""
        out = []
        row = 0
        for request, qo_len, index in zip(
            self.requests, self.plan.qo_lens, self.slots, strict=True
        ):
            out += attention(
                self.q[row : row + qo_len].tolist(),
                self.k[index].tolist(),
                self.v[index].tolist(),
                mask_of(request, window),
                SCALING,
                sinks,
            )
            row += qo_len
        return torch.tensor(out)


class PassPool:
    """The calls that attention backends make on a KV pool."""

    def __init__(self, case: Pass) -> None:
        # What the pass writes is not there before it is written.
        self.k, self.v = case.k.clone(), case.v.clone()
        self.is_latent = case.k.shape != case.v.shape
        self.k[case.written] = self.v[case.written] = torch.nan
        if self.is_latent:
            self.v = self.k[..., : case.v.shape[-1]]

    def set_kv_buffer(self, layer, loc, k, v, *scales):
        self.k[loc.loc] = k.view(-1, *self.k.shape[1:])
        if not self.is_latent:
            self.v[loc.loc] = v.view(-1, *self.v.shape[1:])

    def get_kv_buffer(self, layer_id):
        return self.k, self.v

    def get_key_buffer(self, layer_id):
        return self.k

    def get_value_buffer(self, layer_id):
        return self.v


def batch_of(case: Pass, spec_info: Any) -> ForwardBatch:
    """The pass as SGLang's backends get it."""
    device = case.q.device
    return ForwardBatch(
        input_ids=case.plan.input_ids.to(device),
        positions=case.plan.positions.to(device),
        out_cache_loc=case.written,
        spec_info=spec_info,
        **spec_info.batch_fields(torch.tensor(case.rows, device=device)),
    )


def extend(
    backend: Any,
    case: Pass,
    batch: ForwardBatch,
    window: int | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """[tokens, heads, dim] of one attention layer by `backend`."""
    dim, kv_heads = case.q.shape[-1], case.k.shape[1]
    layer = SimpleNamespace(
        qk_head_dim=dim, v_head_dim=case.v.shape[-1], head_dim=dim, layer_id=0,
        tp_q_head_num=HEADS, tp_k_head_num=kv_heads, tp_v_head_num=kv_heads,
        scaling=SCALING, logit_cap=0.0, logit_capping_method="tanh",
        is_cross_attention=False, attn_type=AttentionType.DECODER,
        sliding_window_size=-1 if window is None else window,
        k_scale=None, v_scale=None, xai_temperature_len=-1,
    )  # fmt: skip
    backend.init_forward_metadata(batch)
    out = backend.forward_extend(
        case.q.reshape(len(case.q), -1),
        case.k[case.written],
        case.v[case.written],
        layer,
        batch,
        **({} if sinks is None else {"sinks": sinks}),
    )
    return out.view(-1, HEADS, case.v.shape[-1])


def latent(seed: int, dim: int = 576, rank: int = 512) -> Pass:
    """A pass of latent attention: one key of `dim` a slot for all heads, whose first
    `rank` columns are its value. The sizes are DeepSeek's."""
    case = make_pass(seed, dim=dim)
    k = case.k[:, :1] / dim**0.5
    return replace(case, k=k, v=k[..., :rank])


def mask_of(request: Request, window: int | None) -> list[list[bool]]:
    """Who sees what in a pass, by the definitions."""
    mask = verify_mask(*request)
    if window is None:
        return mask
    rows = verify_positions(*request)
    return window_mask(mask, rows, [*range(request[0]), *rows], window)


def make_pass(seed: int, num_requests: int = 3, dim: int = DIM) -> Pass:
    rng = random.Random(seed)
    requests = [random_request(rng) for _ in range(num_requests)]
    plan = plan_of(requests)
    num_rows = num_requests + 2
    free = list(range(1, 1 + num_rows * ROW_WIDTH + plan.num_suffix_tokens))
    rng.shuffle(free)
    num_scratch = plan.num_suffix_tokens
    scratch = torch.tensor(free[:num_scratch], dtype=torch.int64)
    table = torch.tensor(free[num_scratch:], dtype=torch.int32).view(num_rows, -1)
    rows = rng.sample(range(num_rows), num_requests)
    slots, written = place_slots(plan, rows=rows, scratch=scratch, table=table)
    generator = torch.Generator().manual_seed(seed)

    def randn(num: int, heads: int) -> torch.Tensor:
        return torch.randn(num, heads, dim, generator=generator)

    num_slots = len(free) + 1
    return Pass(
        requests,
        plan,
        rows,
        table,
        slots,
        written,
        q=randn(plan.num_verify_tokens, HEADS),
        k=randn(num_slots, KV_HEADS),
        v=randn(num_slots, KV_HEADS),
    )
