"""Attention with custom masks in plain torch: requests of a batch in tiles.

Every query row sees the KV columns `c <= limit` and `start <= c <= end` of its own
request. Prefill, decode and the PARSE verify pass are the same statement with
different rows: a causal row has its own column as limit and an empty second span; a
judge-suffix row has the boundary as limit and its own suffix as second span. A layer
with a sliding window sees, of these, the columns whose positions lie in the window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sglang_parse.verify.layout import RowVisibility, expand_mask

# What a tile costs, in cells of a score matrix: to start one, and to gather one KV
# column. Estimated from timings on one EPYC core; they choose shapes, not results.
TILE_CELLS = 5000
COLUMN_CELLS = 8


@dataclass(frozen=True)
class AttentionTile:
    """r requests attended together, padded to q_max rows and kv_max columns each.

    q_index: [r * q_max] int64 rows of the flat query, or None when the tile is exactly
    the flat query. kv_index: [r * kv_max] int64 KV slots. bias: [r, 1, q_max, kv_max]
    float additive mask, or None when every row sees every column. kept: [n] int64
    rows of the tile that are not padding, or None when all are real.
    """

    q_index: Tensor | None
    kv_index: Tensor
    bias: Tensor | None
    kept: Tensor | None
    num_requests: int


def plan_tiles(
    *,
    visibility: RowVisibility,
    qo_lens: list[int],
    kv_index: list[Tensor],
    dtype: torch.dtype,
    window: int | None = None,
) -> list[AttentionTile]:
    """Group the requests of one forward into tiles.

    visibility: per flat row. qo_lens: rows per request. kv_index: slots per request,
    [kv_len] each. dtype: of the additive mask. window: as for `expand_mask`.
    """
    starts = [0, *accumulate(qo_lens)]
    return [
        _plan_tile(visibility, group, starts, qo_lens, kv_index, dtype, window)
        for group in group_alike(qo_lens, [len(k) for k in kv_index])
    ]


def group_alike(qo_lens: Sequence[int], kv_lens: Sequence[int]) -> list[list[int]]:
    """Requests to attend together: where padding costs less than a tile of its own."""

    def cost(requests: int, q_max: int, kv_max: int) -> int:
        return TILE_CELLS + requests * kv_max * (q_max + COLUMN_CELLS)

    order = sorted(range(len(qo_lens)), key=lambda i: (qo_lens[i], kv_lens[i]))
    groups: list[list[int]] = []
    q_max = kv_max = 0
    for i in order:
        q, kv = qo_lens[i], kv_lens[i]
        if groups:
            n = len(groups[-1])
            wide, long = max(q_max, q), max(kv_max, kv)
            if cost(n + 1, wide, long) <= cost(n, q_max, kv_max) + cost(1, q, kv):
                groups[-1].append(i)
                q_max, kv_max = wide, long
                continue
        groups.append([i])
        q_max, kv_max = q, kv
    return [sorted(group) for group in groups]


def _plan_tile(
    visibility: RowVisibility,
    group: list[int],
    starts: list[int],
    qo_lens: list[int],
    kv_index: list[Tensor],
    dtype: torch.dtype,
    window: int | None,
) -> AttentionTile:
    q_lens = torch.tensor([qo_lens[i] for i in group])
    q_max = int(q_lens.max())
    offsets = torch.arange(q_max)
    first = torch.tensor([starts[i] for i in group])
    q_index = first[:, None] + torch.minimum(offsets, q_lens[:, None] - 1)
    slots = torch.nn.utils.rnn.pad_sequence(
        [kv_index[i] for i in group], batch_first=True
    ).long()
    kv_lens = torch.tensor([len(kv_index[i]) for i in group])
    mask = expand_mask(visibility.rows(q_index), slots.shape[1], window)
    mask &= (torch.arange(slots.shape[1]) < kv_lens[:, None])[:, None, :]
    ragged = bool((q_lens != q_max).any())
    whole = len(group) == len(qo_lens) and not ragged
    kept = (offsets < q_lens[:, None]).flatten().nonzero()[:, 0] if ragged else None
    return AttentionTile(
        q_index=None if whole else q_index.flatten(),
        kv_index=slots.flatten(),
        bias=None if bool(mask.all()) else _additive(mask, dtype),
        kept=kept,
        num_requests=len(group),
    )


def plan_decode(
    *,
    table: Tensor,
    rows: Tensor,
    kv_lens: Tensor,
    dtype: torch.dtype,
    window: int | None = None,
) -> AttentionTile:
    """One tile for a decode step: the last token of each request sees all before it.

    table: req_to_token; rows, kv_lens: [bs]. window: as for `expand_mask`. Columns
    that a request does not see hold whatever was there: slot 0 stands in for them,
    which is finite.
    """
    kv_max = int(kv_lens.max())
    slots = table[:, :kv_max].index_select(0, rows).long()
    column = torch.arange(kv_max)
    seen = column < kv_lens[:, None]
    if window is not None:
        seen &= column >= kv_lens[:, None] - 1 - window
    bias = None
    if not bool(seen.all()):
        slots.masked_fill_(~seen, 0)
        bias = _additive(seen[:, None], dtype)
    return AttentionTile(None, slots.flatten(), bias, None, len(rows))


def _additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    """[r, q, kv] bool, True may attend -> [r, 1, q, kv] additive mask."""
    bias = torch.zeros(mask.shape, dtype=dtype)
    return bias.masked_fill_(~mask, torch.finfo(dtype).min)[:, None]


def attend(
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    tiles: list[AttentionTile],
    scaling: float,
    sinks: Tensor | None = None,
    logit_cap: float = 0.0,
) -> Tensor:
    """Masked attention of flat query rows over the KV pool.

    q: [num_tokens, num_heads, head_dim]; k_cache, v_cache: [num_slots, num_kv_heads,
    head_dim]. sinks: [num_heads] scores of one more column, which has no value.
    logit_cap: scores lie between its negative and itself, 0 for no bound. Returns
    [num_tokens, num_heads, v_head_dim].
    """
    attention: Callable[..., Tensor] = scaled_dot_product_attention
    if sinks is not None or logit_cap > 0:
        attention = partial(_plain_attention, sinks=sinks, logit_cap=logit_cap)
    out = q.new_empty(q.shape[0], q.shape[1], v_cache.shape[-1])
    grouped = q.shape[1] != k_cache.shape[1]

    def by_request(rows: Tensor, r: int) -> Tensor:
        return rows.view(r, -1, *rows.shape[1:]).transpose(1, 2)

    for tile in tiles:
        r = tile.num_requests
        rows = q if tile.q_index is None else q.index_select(0, tile.q_index)
        # index_select copies whole slots; indexing by a matrix takes thrice as long.
        result = attention(
            by_request(rows, r),
            by_request(k_cache.index_select(0, tile.kv_index).to(q.dtype), r),
            by_request(v_cache.index_select(0, tile.kv_index).to(q.dtype), r),
            attn_mask=tile.bias,
            scale=scaling,
            enable_gqa=grouped,
        ).transpose(1, 2)
        result = result.reshape(-1, *out.shape[1:])
        if tile.q_index is None:
            return result
        where = tile.q_index
        if tile.kept is not None:
            result = result.index_select(0, tile.kept)
            where = where[tile.kept]
        out.index_copy_(0, where, result)
    return out


def _plain_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    attn_mask: Tensor | None,
    scale: float,
    enable_gqa: bool,
    sinks: Tensor | None,
    logit_cap: float,
) -> Tensor:
    """`scaled_dot_product_attention` with sinks and bounded scores."""
    if enable_gqa:
        groups = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(groups, dim=1) for t in (k, v))
    scores = (q @ k.transpose(-1, -2)) * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    if attn_mask is not None:
        scores = scores + attn_mask
    if sinks is not None:
        sink = sinks.to(scores.dtype)[None, :, None, None]
        scores = torch.cat([scores, sink.expand(*scores.shape[:3], 1)], dim=-1)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)
    return weights[..., : k.shape[2]] @ v
