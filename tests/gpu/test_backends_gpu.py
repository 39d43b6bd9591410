"""Both routes through the real kernels of FlashInfer and Triton.

Tolerance 2e-2: inputs and outputs are bfloat16, the oracle computes in float64 from
the same rounded inputs.
"""

import pytest
import torch

from sglang_parse.target.backends.registry import build_verify_input
from tests.support.passes import HEADS, KV_HEADS, SCALING, make_pass

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device"),
]
SEEDS = range(6)
TOLERANCE = 2e-2


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("route", ["mask", "virtual"])
@pytest.mark.parametrize("seed", SEEDS)
def test_flashinfer_kernel_gives_the_oracles_attention(seed, route, dim):
    """Red if FlashInfer reads our arrays or mask bits otherwise than documented."""
    from flashinfer import BatchPrefillWithPagedKVCacheWrapper

    case = make_pass(seed, dim=dim).to("cuda", torch.bfloat16)
    info = build_verify_input(
        route, "flashinfer", case.plan, case.slots, torch.tensor([0], device="cuda")
    )
    rows = torch.tensor(case.rows, device="cuda")
    kv_indices, kv_indptr, qo_indptr, mask = info.generate_attn_arg_prefill(
        req_pool_indices=rows
    )
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD", backend="fa2")
    wrapper.begin_forward(
        qo_indptr,
        kv_indptr,
        kv_indices,
        torch.ones(len(kv_indptr) - 1, dtype=torch.int32, device="cuda"),
        HEADS,
        KV_HEADS,
        dim,
        1,
        q_data_type=torch.bfloat16,
        kv_data_type=torch.bfloat16,
        custom_mask=mask,
        non_blocking=True,
    )
    cache = (case.k.unsqueeze(1), case.v.unsqueeze(1))
    out = wrapper.forward(case.q, cache, causal=True, sm_scale=SCALING)
    assert (out.float().cpu() - case.oracle()).abs().max() < TOLERANCE


@pytest.mark.parametrize("seed", SEEDS)
def test_triton_backend_gives_the_oracles_attention(seed):
    """Red if the compiled extend kernel does what the interpreted one does not."""
    from tests.support.triton_pass import run

    case = make_pass(seed, dim=64).to("cuda", torch.bfloat16)
    out = run(case)
    assert (out.float().cpu() - case.oracle()).abs().max() < TOLERANCE
