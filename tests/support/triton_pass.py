"""Verify passes through SGLang's own Triton backend, its kernels interpreted on CPU.

Run by test_backends.py in a process of its own with TRITON_INTERPRET=1, which Triton
reads when it is imported. Prints one line of JSON: the largest deviation from the
oracle of each seed: as is, deterministic, and with a sliding window and sinks; then of
latent KV with the first two seeds. On a
machine with a card tests/gpu runs the same compiled.
"""

import json
import sys

import torch
from sglang.kernels.ops.attention.extend_attention import (
    build_unified_kv_indices,
    extend_attention_fwd,
    extend_attention_fwd_unified,
)
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator

from sglang_parse.sgl.compat.backend_changes import holds_pass
from sglang_parse.verify.backends.routes import backend_of, build_verify_input
from tests.support.passes import (
    HEADS,
    Pass,
    PassPool,
    batch_of,
    extend,
    latent,
    make_pass,
)


def make_backend(case: Pass, window: int | None, page_size: int) -> TritonAttnBackend:
    """A Triton backend with what an ordinary dense model leaves set."""
    backend = TritonAttnBackend.__new__(TritonAttnBackend)
    device = backend.device = case.q.device
    backend.token_to_kv_pool = PassPool(case)
    backend.kv_index_translator = KVIndexTranslator(
        req_to_token=case.table,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=None,
        page_size=1,
        device=str(device),
    )
    # Sized by requests, as SGLang does.
    size = len(case.table) + 1
    backend.kv_indptr = torch.zeros(size, dtype=torch.int32, device=device)
    backend.qo_indptr = torch.zeros(size, dtype=torch.int64, device=device)
    backend.extend_attention_fwd = extend_attention_fwd
    backend.dcp_size, backend.page_size = 1, page_size
    backend.dllm_attention = None
    backend.sliding_window_size, backend.window_kv_indptr = window, None
    if window is not None:
        backend.window_kv_indptr = torch.zeros(size, dtype=torch.int32, device=device)
    for name in (
        "use_sliding_window_kv_pool",
        "enable_deterministic",
        "use_dense_fp8_chunked_prefill",
        "use_mla",
        "use_verify_shared_kv",
        "use_verify_splitkv",
    ):
        setattr(backend, name, False)
    return backend


def run(
    case: Pass,
    window: int | None = None,
    sinks: torch.Tensor | None = None,
    *,
    deterministic: bool = False,
    page_size: int = 1,
) -> torch.Tensor:
    """[tokens, heads, dim] of one attention layer. sinks: [heads]. deterministic: as
    under --enable-deterministic-inference."""
    backend = make_backend(case, window, page_size)
    backend.enable_deterministic = deterministic
    backend.build_unified_kv_indices = build_unified_kv_indices
    backend.extend_attention_fwd_unified = extend_attention_fwd_unified
    spec_info = build_verify_input(
        "virtual", "triton", case.plan, case.slots, torch.tensor([0])
    )
    backend.use_mla = backend.token_to_kv_pool.is_latent
    batch = batch_of(case, spec_info)
    backend.kv_index_translator.bind_own_plan(batch)
    kept = backend.kv_indptr
    buffers = backend_of("triton").buffers
    with holds_pass(backend, buffers, num_sequences=batch.batch_size):
        out = extend(backend, case, batch, window, sinks)
    assert backend.kv_indptr is kept
    return out


if __name__ == "__main__":
    deviations = []
    for seed in map(int, sys.argv[1:]):
        case = make_pass(seed)
        for deterministic in (False, True):
            # Odd seeds have pages.
            size = 1 + 3 * (seed % 2)
            out = run(case, deterministic=deterministic, page_size=size)
            seen = out - case.oracle()
            deviations.append(float(seen.abs().max()))
        sinks = torch.linspace(-1.0, 2.0, HEADS)
        seen = run(case, window=5, sinks=sinks) - case.oracle(5, sinks.tolist())
        deviations.append(float(seen.abs().max()))
    for seed in map(int, sys.argv[1:3]):
        case = latent(seed)
        deviations.append(float((run(case) - case.oracle()).abs().max()))
    sys.stdout.write(json.dumps(deviations) + "\n")
