"""Torch-native attention that honours custom masks: the plain reference.

Every query row sees the KV columns `c <= limit` and `start <= c <= end` of its own
request. Prefill, decode and the PARSE verify pass are the same statement with
different rows: a causal row has its own column as limit and an empty second span; a
judge-suffix row has the boundary as limit and its own suffix as second span. A layer
with a sliding window sees, of these, the columns whose positions lie in the window.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from sglang_parse.runtime.names import CPU_ATTENTION_BACKEND
from sglang_parse.target.backends.base import ParseVerifyInput
from sglang_parse.target.layout import RowVisibility, expand_mask

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch

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


@dataclass(frozen=True)
class _Rows:
    """Who sees what in one forward (arguments of `plan_tiles`)."""

    visibility: RowVisibility
    qo_lens: list[int]
    kv_index: list[Tensor]


def read_latent_kv() -> None:
    """Have models with latent KV hand it to this backend in every forward.

    SGLang asks a table by the backend's name, and takes names that it lacks for Triton,
    which attends over expanded keys in prefills.
    Source: sglang/srt/models/deepseek_common/attention_backend_handler.py.
    """
    from sglang.srt.models.deepseek_common import attention_backend_handler as handler

    handler.AttentionBackendRegistry.register(
        CPU_ATTENTION_BACKEND, lambda *_: handler.AttnForwardMethod.MLA
    )


class ParseTorchAttnBackend(TorchNativeAttnBackend):
    """SGLang attention backend `parse_torch`: all requests of a forward at once.

    Sliding windows, both their pools, sinks, bounded scores and latent KV are part of
    it. Cross attention and encoder layers go to the stock torch-native code, which has
    no custom mask; PARSE refuses such targets at start-up.
    """

    needs_cpu_seq_lens = True

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        self.dtype = model_runner.dtype
        self._batch: ForwardBatch | None = None
        self._rows: _Rows | None = None
        self._tiles: dict[tuple[int | None, bool], list[AttentionTile]] = {}

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        super().init_forward_metadata(forward_batch)
        self._batch, self._rows, self._tiles = forward_batch, None, {}

    def tiles_of(self, layer: RadixAttention) -> list[AttentionTile]:
        """Tiles of this forward for a layer; layers of one window share theirs."""
        window = layer.sliding_window_size
        window = None if window is None or window < 0 else int(window)
        in_window_pool = self._is_in_window_pool(layer)
        key = (window, in_window_pool)
        if key not in self._tiles:
            tiles = self._plan(window)
            if in_window_pool:
                translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
                # A column outside the window may have lost its slot: any will do.
                tiles = [
                    replace(t, kv_index=translate(t.kv_index).long().clamp_min(0))
                    for t in tiles
                ]
            self._tiles[key] = tiles
        return self._tiles[key]

    def _is_in_window_pool(self, layer: RadixAttention) -> bool:
        """Whether a layer's KV lies in the pool of its own that windows have."""
        if not self.use_sliding_window_kv_pool:
            return False
        return bool(self.token_to_kv_pool.layers_mapping[layer.layer_id][1])

    def _plan(self, window: int | None) -> list[AttentionTile]:
        forward = self._batch
        assert forward is not None
        if forward.forward_mode.is_decode() and (tile := self._decode_tile(window)):
            return [tile]
        if self._rows is None:
            verifies = isinstance(forward.spec_info, ParseVerifyInput)
            told = (
                forward.spec_info.attention_rows() if verifies else self._causal_rows()
            )
            self._rows = _Rows(*told)
        return plan_tiles(
            visibility=self._rows.visibility,
            qo_lens=self._rows.qo_lens,
            kv_index=self._rows.kv_index,
            dtype=self.dtype,
            window=window,
        )

    def _decode_tile(self, window: int | None) -> AttentionTile | None:
        """The tile of a decode step, None where its requests need more than one."""
        forward = self._batch
        assert forward is not None
        kv_lens = forward.seq_lens_cpu.tolist()
        if len(group_alike([1] * len(kv_lens), kv_lens)) > 1:
            return None
        return plan_decode(
            table=self.req_to_token_pool.req_to_token,
            rows=forward.req_pool_indices,
            kv_lens=forward.seq_lens_cpu,
            dtype=self.dtype,
            window=window,
        )

    def _causal_rows(self) -> tuple[RowVisibility, list[int], list[Tensor]]:
        forward = self._batch
        assert forward is not None
        rows = forward.req_pool_indices.tolist()
        kv_lens = forward.seq_lens.tolist()
        table = self.req_to_token_pool.req_to_token
        if forward.forward_mode.is_decode():
            qo_lens = [1] * len(kv_lens)
        else:
            qo_lens = forward.extend_seq_lens.tolist()
        limits = torch.cat(
            [torch.arange(kv - q, kv) for q, kv in zip(qo_lens, kv_lens, strict=True)]
        )
        kv_index = [table[row, :kv] for row, kv in zip(rows, kv_lens, strict=True)]
        return RowVisibility.causal(limits), qo_lens, kv_index

    def forward_extend(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._forward(super().forward_extend, *args, **kwargs)

    def forward_decode(self, *args: Any, **kwargs: Any) -> Tensor:
        return self._forward(super().forward_decode, *args, **kwargs)

    def _forward(
        self,
        stock: Callable[..., Tensor],
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: RadixAttention,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
        sinks: Tensor | None = None,
        **_: Any,
    ) -> Tensor:
        if _needs_stock_path(layer):
            return stock(q, k, v, layer, forward_batch, save_kv_cache)
        if save_kv_cache and k is not None:
            self.token_to_kv_pool.set_kv_buffer(
                layer,
                KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc),
                k,
                v,
            )
        out = attend(
            q=q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim),
            k_cache=self.token_to_kv_pool.get_key_buffer(layer.layer_id),
            v_cache=self.token_to_kv_pool.get_value_buffer(layer.layer_id),
            tiles=self.tiles_of(layer),
            scaling=layer.scaling,
            sinks=sinks,
            logit_cap=layer.logit_cap,
        )
        return out.reshape(-1, layer.tp_q_head_num * layer.v_head_dim)


def _needs_stock_path(layer: RadixAttention) -> bool:
    return layer.is_cross_attention or layer.attn_type == AttentionType.ENCODER_ONLY
