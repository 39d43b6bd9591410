"""The attention backend `parse_torch`: the plain reference of every pass.

It honours custom masks. `cpu/tiles.py` computes, and says which rows see what.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from sglang_parse.cpu.tiles import (
    AttentionTile,
    attend,
    group_alike,
    plan_decode,
    plan_tiles,
)
from sglang_parse.sgl.names import CPU_ATTENTION_BACKEND
from sglang_parse.verify.backends.verify_backend import ParseVerifyInput
from sglang_parse.verify.layout import RowVisibility

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch


#: Who sees what in one forward: visibility, rows and slots of each request.
Rows = tuple[RowVisibility, list[int], list[Tensor]]


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
        self._rows: Rows | None = None
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
            self._rows = (
                forward.spec_info.attention_rows() if verifies else self._causal_rows()
            )
        visibility, qo_lens, kv_index = self._rows
        return plan_tiles(
            visibility=visibility,
            qo_lens=qo_lens,
            kv_index=kv_index,
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

    def _causal_rows(self) -> Rows:
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
