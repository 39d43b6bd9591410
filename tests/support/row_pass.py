"""Verify passes through SGLang's backends that read rows of slots: FlashAttention 3,
with a reference in place of its kernel, and the torch backend as it is."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from sglang_parse.sgl.compat.backend_changes import holds_pass
from sglang_parse.verify.backends.routes import build_verify_input
from tests.support.passes import Pass, PassPool, batch_of, extend
from tests.support.reference import attention


def flash_attention(
    *,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    page_table: Tensor,
    cache_seqlens: Tensor,
    cu_seqlens_q: Tensor,
    max_seqlen_q: int,
    softmax_scale: float,
    causal: bool,
    window_size: tuple[int, int],
    sinks: Tensor | None = None,
    **_: Any,
) -> Tensor:
    """What FlashAttention's `flash_attn_with_kvcache` says it computes, by loops: the
    last query of a sequence stands at its last key.

    q: [tokens, heads, dim]; k_cache, v_cache: [pages, 1, heads, dim].
    """
    assert causal and k_cache.shape[1] == 1
    assert page_table.dtype == cache_seqlens.dtype == cu_seqlens_q.dtype == torch.int32
    out: list[Any] = []
    ends = cu_seqlens_q.tolist()
    for i, num_keys in enumerate(cache_seqlens.tolist()):
        first, last = ends[i], ends[i + 1]
        assert last - first <= max_seqlen_q
        slots = page_table[i, :num_keys].long()
        left = num_keys if window_size[0] < 0 else window_size[0]
        places = range(num_keys - (last - first), num_keys)
        mask = [[p - left <= c <= p for c in range(num_keys)] for p in places]
        out += attention(
            q[first:last].tolist(),
            k_cache[slots, 0].tolist(),
            v_cache[slots, 0].tolist(),
            mask,
            softmax_scale,
            None if sinks is None else sinks.tolist(),
        )
    return torch.tensor(out)


def fa3_backend(case: Pass, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A FlashAttention backend with what an ordinary dense model leaves set; its kernel
    is the compiled one where the pass is on a card."""
    on_card = case.q.is_cuda
    stub = ModuleType("sgl_kernel")
    stub.merge_state_v2 = None  # type: ignore[attr-defined]
    name = "sglang.srt.layers.attention.flashattention_backend"
    if not on_card and name not in sys.modules:
        monkeypatch.setitem(sys.modules, "sgl_kernel", stub)
    from sglang.srt.layers.attention import flashattention_backend as module

    if not on_card:
        monkeypatch.setattr(module, "flash_attn_with_kvcache", flash_attention)
    monkeypatch.setattr(module, "is_cp_active", lambda batch: False)
    backend = module.FlashAttentionBackend.__new__(module.FlashAttentionBackend)
    backend.device, backend.page_size, backend.fa_impl_ver = case.q.device, 1, 3
    backend.topk, backend.num_splits, backend.max_context_len = 1, 0, 4096
    backend.speculative_num_draft_tokens = 2
    backend.kv_cache_dtype, backend.kv_cache_dtype_str = case.q.dtype, "auto"
    backend.local_attn_builder = backend.full_cg_prefill_metadata = None
    backend.kv_index_translator = SimpleNamespace(is_translating=False)
    for name in (
        *("use_mla", "has_swa", "use_sliding_window_kv_pool", "is_prefill_aware_swa"),
        *("fa_skip_kv_cache", "kv_cache_is_mxfp8", "has_local_attention"),
    ):
        setattr(backend, name, False)
    return backend


def torch_backend(case: Pass, monkeypatch: pytest.MonkeyPatch) -> Any:
    """SGLang's torch backend."""
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    return TorchNativeAttnBackend(
        SimpleNamespace(device="cpu", req_to_token_pool=None, token_to_kv_pool=None)
    )


MAKERS = {"fa3": fa3_backend, "torch_native": torch_backend}


def run(
    name: str,
    case: Pass,
    monkeypatch: pytest.MonkeyPatch,
    *,
    window: int | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """[tokens, heads, dim] of one attention layer of backend `name`."""
    backend = MAKERS[name](case, monkeypatch)
    backend.token_to_kv_pool = PassPool(case)
    pool = backend.req_to_token_pool = SimpleNamespace(req_to_token=case.table)
    spec_info = build_verify_input(
        "rows", name, case.plan, case.slots, torch.tensor([0])
    )
    with holds_pass(backend, (), num_sequences=0, table=spec_info.table):
        out = extend(backend, case, batch_of(case, spec_info), window, sinks)
    assert backend.req_to_token_pool is pool
    return out
