"""All routes through the real kernels of FlashInfer, Triton and FlashAttention 3.

Tolerance 2e-2: inputs and outputs are bfloat16, the oracle computes in float64 from
the same rounded inputs.
"""

import pytest
import torch

from sglang_parse.verify.backends.routes import build_verify_input
from tests.support.passes import HEADS, KV_HEADS, SCALING, latent, make_pass

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


@pytest.mark.parametrize("page_size", [1, 16])
def test_triton_backend_gives_the_oracles_latent_attention(page_size):
    """Red if the compiled extend kernel reads latent KV otherwise, or pages of it."""
    from tests.support.triton_pass import run

    case = latent(1).to("cuda", torch.bfloat16)
    out = run(case, page_size=page_size).float().cpu()
    assert (out - case.oracle()).abs().max() < TOLERANCE


@pytest.mark.parametrize("seed", range(2))
def test_flashinfer_kernel_gives_the_oracles_latent_attention(seed):
    """Red if FlashInfer's latent attention reads our arrays otherwise than planned."""
    from flashinfer.mla import BatchMLAPagedAttentionWrapper

    case = latent(seed).to("cuda", torch.bfloat16)
    info = build_verify_input(
        "virtual", "flashinfer", case.plan, case.slots, torch.tensor([0], device="cuda")
    )
    rows = torch.tensor(case.rows, device="cuda")
    kv_indices, kv_indptr, qo_indptr, _ = info.generate_attn_arg_prefill(
        req_pool_indices=rows
    )
    workspace = torch.empty(128 << 20, dtype=torch.uint8, device="cuda")
    wrapper = BatchMLAPagedAttentionWrapper(workspace, backend="auto")
    dtypes = (torch.bfloat16, torch.bfloat16)
    wrapper.plan(
        *(qo_indptr, kv_indptr, kv_indices, kv_indptr.diff(), HEADS, 512, 64, 1),
        *(True, SCALING, *dtypes),
    )
    q, k = case.q, case.k
    out = wrapper.run(q[..., :512], q[..., 512:], k[..., :512], k[..., 512:])
    assert (out.float().cpu() - case.oracle()).abs().max() < TOLERANCE


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability()[0] != 9,
    reason="FlashAttention 3 is for Hopper",
)
@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("seed", SEEDS)
def test_flash_attention_kernel_gives_the_oracles_attention(monkeypatch, seed, window):
    """Red if FlashAttention 3 reads a pass's own table, or a window, otherwise than the
    reference that stands for it on CPU."""
    from tests.support.row_pass import run

    case = make_pass(seed, dim=64).to("cuda", torch.bfloat16)
    out = run("fa3", case, monkeypatch, window=window).float().cpu()
    assert (out - case.oracle(window)).abs().max() < TOLERANCE
