"""Sparse attention with an index, in plain torch: what SGLang has on GPUs alone.

SGLang's own model code runs it: its indexer's projections, norms and rotary positions,
its layers that share what an earlier one selected, and its KV pool. In the place of the
kernels stand the scores of index keys, the selection, and the attention to it. As the
kernels do, they find the index keys of a row by whole pages of 64 slots.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch import Tensor

from sglang_parse.cpu.attention import ParseTorchAttnBackend
from sglang_parse.sgl.names import SPARSE_ATTENTION

PAGE = 64


class SparseTorchBackend(ParseTorchAttnBackend):
    """The backend `dsa`: reads the slots that the index has selected for each row."""

    use_mha = False

    def _forward(
        self,
        stock: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        *,
        q_rope: Tensor,
        k_rope: Tensor,
        topk_indices: Tensor,
        **_: Any,
    ) -> Tensor:
        pool = self.token_to_kv_pool
        if save_kv_cache:
            pool.set_mla_kv_buffer(
                layer, KVWriteLoc(forward_batch.out_cache_loc, None), k, k_rope
            )
        queries = torch.cat([q, q_rope], dim=-1)
        keys = pool.get_key_buffer(layer.layer_id)[topk_indices.clamp_min(0)].squeeze(2)
        scores = torch.einsum("rhd,rkd->rhk", queries, keys) * layer.scaling
        scores = scores.masked_fill((topk_indices < 0)[:, None], -torch.inf)
        values = keys[..., : layer.v_head_dim]
        out = torch.einsum("rhk,rkd->rhd", scores.softmax(-1), values)
        return out.reshape(len(out), -1)


def best_of(scores: Tensor, num: int, rows: Tensor) -> Tensor:
    """[rows, num] columns of the highest scores [rows, columns], -inf behind a row's
    own place. rows: of req_to_token."""
    return scores.topk(num).indices


def select(
    self: Any,
    x: Tensor,
    q_lora: Tensor,
    positions: Tensor,
    forward_batch: Any,
    layer_id: int,
    return_indices: bool = True,
) -> Tensor:
    """[rows, index_topk] slots that each row attends to, -1 for none: the place of
    `Indexer.forward_native`."""
    from sglang.srt.model_executor.forward_context import get_attn_backend

    backend = get_attn_backend()
    query = self.wq_b(q_lora)[0].view(-1, self.n_heads, self.head_dim)
    key = self.k_norm(self.wk(x)[0])[:, None]
    parts = [t[..., : self.rope_head_dim] for t in (query, key)]
    for part, turned in zip(parts, self.rotary_emb(positions, *parts), strict=True):
        part.copy_(turned.view_as(part))
    if not hasattr(self, "keys"):
        size = backend.token_to_kv_pool.get_key_buffer(layer_id).shape[0]
        self.keys = torch.full((size, self.head_dim), torch.nan)
    self.keys[forward_batch.out_cache_loc] = key[:, 0].float()
    rows = forward_batch.req_pool_indices
    if forward_batch.forward_mode.is_extend():
        rows = rows.repeat_interleave(forward_batch.extend_seq_lens.long())
    num = int(positions.max()) + 1
    pages = backend.req_to_token_pool.req_to_token[rows, :num:PAGE].long() // PAGE
    slots = (pages[..., None] * PAGE + torch.arange(PAGE)).flatten(1)
    products = torch.einsum("rhd,rsd->rhs", query.float(), self.keys[slots])
    gates = x.float() @ self.weights_proj.weight.float().T * self.n_heads**-0.5
    scores = torch.einsum("rh,rhs->rs", gates, products.relu() * self.softmax_scale)
    is_seen = torch.arange(slots.shape[1]) <= positions[:, None]
    scores = scores.masked_fill(~is_seen, -torch.inf)
    best = best_of(scores, min(self.index_topk, slots.shape[1]), rows)
    chosen = torch.where(is_seen.gather(1, best), slots.gather(1, best), -1)
    missing = self.index_topk - chosen.shape[1]
    return torch.nn.functional.pad(chosen, (0, missing), value=-1)


def install() -> None:
    """Let this process serve such models on the CPU platform."""
    from sglang.srt.arg_groups import model_hook
    from sglang.srt.layers.attention.attention_registry import (
        register_attention_backend,
    )
    from sglang.srt.layers.attention.dsa.dsa_indexer import Indexer

    register_attention_backend(SPARSE_ATTENTION)(SparseTorchBackend)
    Indexer.forward_native = select
    torch.cuda.get_device_capability = lambda *_: (9, 0)  # SGLang asks for a log line
    # They choose by the CUDA device. KV has the type of the weights here.
    model_hook._dsa_kv_cache_dtype_default = lambda view: {}
    model_hook._dsa_split_backend_resolution = lambda view: {}
