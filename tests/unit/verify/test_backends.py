"""Both routes of a verify pass, up to what the attention backends read.

FlashInfer's own planning step runs here on CPU tensors; its kernels cannot, so
`paged_attention` below reads the arrays as their documentation says. Triton's kernels
do run, interpreted.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from sglang_parse.cpu.tiles import attend, plan_tiles
from sglang_parse.sgl.compat.backend_changes import holds_pass
from sglang_parse.verify.backends import routes as registry
from sglang_parse.verify.backends.mask import MaskedVerifyInput
from sglang_parse.verify.backends.routes import (
    backend_of,
    build_verify_input,
)
from sglang_parse.verify.backends.virtual import ExtendVerifyInput, VirtualVerifyInput
from sglang_parse.verify.layout import build_virtual_sequences
from tests.support.passes import (
    HEADS,
    KV_HEADS,
    SCALING,
    Pass,
    latent,
    make_pass,
)
from tests.support.reference import verify_mask

ROOT = Path(__file__).parents[3]
SEEDS = range(12)
TOLERANCE = 1e-5  # float32, the same sums in another order


def segment_packbits(
    bits: np.ndarray, indptr: np.ndarray, bitorder: str = "little"
) -> tuple[np.ndarray, np.ndarray]:
    """Every segment packed by itself, as flashinfer/quantization/packbits.py says."""
    lens = np.diff(indptr)
    new_indptr = np.concatenate([[0], np.cumsum((lens + 7) // 8)])
    parts = [
        np.packbits(bits[a:b], bitorder=bitorder)
        for a, b in zip(indptr, indptr[1:], strict=False)
    ]
    return np.concatenate(parts), new_indptr


def test_segment_packbits_gives_the_documented_example():
    """Red if the stand-in for FlashInfer's packing kernel is wrong."""
    bits = np.array([1, 0, 1, 1, 0, 0, 1, 1, 1, 0, 1], dtype=bool)
    packed, indptr = segment_packbits(bits, np.array([0, 4, 7, 11]), bitorder="big")
    assert packed.tolist() == [0b10110000, 0b00100000, 0b11010000]
    assert indptr.tolist() == [0, 1, 2, 3]


def flashinfer_plan(case: Pass, route: str) -> dict:
    """What SGLang's FlashInfer backend hands to a wrapper's `begin_forward`."""
    from sglang.srt.layers.attention.flashinfer_backend import (
        FlashInferIndicesUpdaterPrefill,
    )

    updater = FlashInferIndicesUpdaterPrefill.__new__(FlashInferIndicesUpdaterPrefill)
    updater.attn_backend = SimpleNamespace(
        kv_index_translator=SimpleNamespace(reads_are_translated=False)
    )
    updater.num_qo_heads, updater.num_kv_heads, updater.head_dim = HEADS, KV_HEADS, 16
    updater.q_data_type = updater.data_type = torch.bfloat16
    # SGLang's buffers: as many entries as the pool has requests.
    updater.kv_last_page_len = torch.ones(len(case.requests), dtype=torch.int32)
    planned = {}

    def begin_forward(qo_indptr, kv_indptr, kv_indices, last_page_len, *sizes, **more):
        planned.update(
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            last_page_len=last_page_len,
            page_size=sizes[-1],
            **more,
        )

    wrapper = SimpleNamespace(begin_forward=begin_forward, is_cuda_graph_enabled=False)
    spec_info = build_verify_input(
        route, "flashinfer", case.plan, case.slots, torch.tensor([0])
    )
    fields = spec_info.batch_fields(torch.tensor(case.rows))
    backend = SimpleNamespace(indices_updater_prefill=updater)
    buffers = backend_of("flashinfer").buffers
    with holds_pass(backend, buffers, num_sequences=fields["batch_size"]):
        updater.call_begin_forward(
            None,
            wrapper,
            fields["req_pool_indices"],
            fields["seq_lens"],
            fields["seq_lens_sum"],
            fields["seq_lens"],
            None,
            None,
            torch.zeros(1, dtype=torch.int32),
            torch.zeros(1, dtype=torch.int32),
            use_ragged=False,
            spec_info=spec_info,
            seq_lens_cpu=fields["seq_lens_cpu"],
            plan=None,
        )
    assert len(updater.kv_last_page_len) == len(case.requests)
    return planned


def flashinfer_mla_plan(case: Pass) -> dict:
    """What SGLang's FlashInfer backend of latent KV hands to its wrapper's `plan`."""
    from sglang.srt.layers.attention.flashinfer_mla_backend import (
        FlashInferMLAIndicesUpdaterPrefill,
    )

    updater = FlashInferMLAIndicesUpdaterPrefill.__new__(
        FlashInferMLAIndicesUpdaterPrefill
    )
    updater.num_local_heads, updater.scaling = HEADS, SCALING
    updater.kv_lora_rank, updater.qk_rope_head_dim = 512, 64
    updater.q_data_type = updater.data_type = torch.bfloat16
    # SGLang's buffers: an entry more than the pool has requests.
    updater.kv_indptr = torch.zeros(len(case.requests) + 1, dtype=torch.int32)
    updater.qo_indptr = updater.kv_indptr.clone()
    updater.prefill_wrapper_ragged = None
    updater.attn_backend = SimpleNamespace(kv_index_translator=None)
    planned = {}

    def plan(qo_indptr, kv_indptr, kv_indices, kv_lens, *sizes):
        heads, rank, rope, page_size, causal, scale, *_ = sizes
        assert (heads, rank, rope, scale) == (HEADS, 512, 64, SCALING)
        assert (page_size, causal) == (1, True)
        assert kv_lens.tolist() == kv_indptr.diff().tolist()
        planned.update(
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            custom_mask=None,
        )

    spec_info = build_verify_input(
        "virtual", "flashinfer", case.plan, case.slots, torch.tensor([0])
    )
    fields = spec_info.batch_fields(torch.tensor(case.rows))
    backend = SimpleNamespace(indices_updater_prefill=updater)
    buffers = backend_of("flashinfer").buffers
    with holds_pass(backend, buffers, num_sequences=fields["batch_size"]):
        updater.update(
            fields["req_pool_indices"],
            fields["seq_lens"],
            fields["seq_lens_sum"],
            prefix_lens=None,
            prefill_wrapper_paged=SimpleNamespace(plan=plan),
            use_ragged=False,
            spec_info=spec_info,
            plan=None,
        )
    return planned


def packed_mask(planned: dict) -> tuple[np.ndarray, np.ndarray]:
    """The mask as `plan` packs it (flashinfer/prefill.py): (bytes, byte offsets)."""
    num_columns = (np.diff(planned["kv_indptr"]) - 1) * planned["page_size"]
    num_columns = num_columns + planned["last_page_len"].numpy()
    cells = np.diff(planned["qo_indptr"]) * num_columns
    indptr = np.concatenate([[0], np.cumsum(cells)])
    mask = planned["custom_mask"].numpy()
    assert mask.dtype == bool and mask.shape == (indptr[-1],)
    return segment_packbits(mask, indptr)


def paged_attention(case: Pass, planned: dict) -> torch.Tensor:
    """Attention as FlashInfer's kernels read the planned arrays.

    Mask bits as in attention/variants.cuh: bit q * kv_len + c of the sequence's own
    bytes. Without a mask, causal with the last query at the last column.
    """
    packed, indptr = (
        packed_mask(planned) if planned["custom_mask"] is not None else (None, None)
    )
    qo, kv = planned["qo_indptr"].tolist(), planned["kv_indptr"].tolist()
    out = case.q.new_empty(*case.q.shape[:2], case.v.shape[-1])
    for s in range(len(qo) - 1):
        index = planned["kv_indices"][kv[s] : kv[s + 1]].long()
        qo_len, kv_len = qo[s + 1] - qo[s], kv[s + 1] - kv[s]
        group = case.q.shape[1] // case.k.shape[1]
        k, v = (x[index].repeat_interleave(group, dim=1) for x in (case.k, case.v))
        for i in range(qo_len):
            if packed is None:
                seen = torch.arange(kv_len) <= kv_len - qo_len + i
            else:
                bits = [i * kv_len + c for c in range(kv_len)]
                seen = torch.tensor(
                    [bool(packed[indptr[s] + b // 8] >> (b % 8) & 1) for b in bits]
                )
            scores = torch.einsum("hd,chd->hc", case.q[qo[s] + i], k) * SCALING
            weights = scores.masked_fill(~seen, -torch.inf).softmax(-1)
            out[qo[s] + i] = torch.einsum("hc,chd->hd", weights, v)
    return out


@pytest.mark.parametrize("seed", SEEDS)
def test_packed_mask_bits_equal_oracle(seed):
    """Red if prefix columns are missing, or a request starts inside another's byte."""
    case = make_pass(seed)
    planned = flashinfer_plan(case, "mask")
    packed, indptr = packed_mask(planned)
    for i, request in enumerate(case.requests):
        expected = np.packbits(
            np.array(verify_mask(*request)).flatten(), bitorder="little"
        )
        assert packed[indptr[i] : indptr[i + 1]].tolist() == expected.tolist()


@pytest.mark.parametrize("seed", SEEDS)
def test_flashinfer_of_latent_kv_reads_what_the_oracle_reads(seed):
    """Red if the planning step of latent KV takes requests for sequences, or asks the
    pass for buffers that the backend of other models has."""
    case = latent(seed, dim=24, rank=16)
    result = paged_attention(case, flashinfer_mla_plan(case))
    assert (result - case.oracle()).abs().max() < TOLERANCE


@pytest.mark.parametrize("route", ["mask", "virtual"])
@pytest.mark.parametrize("seed", SEEDS)
def test_flashinfer_route_reads_what_the_oracle_reads(seed, route):
    """Red if either route shows a query another column, slot or order."""
    case = make_pass(seed)
    planned = flashinfer_plan(case, route)
    assert (planned["custom_mask"] is None) == (route == "virtual")
    result = paged_attention(case, planned)
    assert (result - case.oracle()).abs().max() < TOLERANCE


@pytest.mark.parametrize("route", ["mask", "virtual"])
def test_flashinfer_arguments_have_the_types_and_lengths_it_wants(route):
    """Red if an array is int64, or there are fewer last pages than sequences."""
    case = make_pass(3, num_requests=4)
    planned = flashinfer_plan(case, route)
    num_sequences = len(case.requests)
    if route == "virtual":
        num_sequences += sum(len(r[2]) for r in case.requests)
    for name in ("qo_indptr", "kv_indptr", "kv_indices", "last_page_len"):
        assert planned[name].dtype == torch.int32, name
    assert len(planned["qo_indptr"]) == len(planned["kv_indptr"]) == num_sequences + 1
    assert planned["last_page_len"].tolist() == [1] * num_sequences
    assert planned["qo_indptr"][-1] == case.plan.num_verify_tokens
    assert planned["kv_indptr"][-1] == len(planned["kv_indices"])
    assert planned["page_size"] == 1


@pytest.mark.parametrize("kind", [MaskedVerifyInput, VirtualVerifyInput])
@pytest.mark.parametrize("seed", SEEDS)
def test_torch_backend_gives_the_oracles_attention_by_both_routes(seed, kind):
    """Red if the CPU's virtual route cannot be compared with its mask."""
    case = make_pass(seed)
    result = torch_attention(kind, case)
    assert (result - case.oracle()).abs().max() < TOLERANCE


def torch_attention(kind, case: Pass, window=None, sinks=None) -> torch.Tensor:
    info = kind(case.plan, case.slots, torch.tensor([0]))
    visibility, qo_lens, kv_index = info.attention_rows()
    tiles = plan_tiles(
        visibility=visibility, qo_lens=qo_lens, kv_index=kv_index,
        dtype=torch.float32, window=window,
    )  # fmt: skip
    return attend(
        q=case.q, k_cache=case.k, v_cache=case.v, tiles=tiles, scaling=SCALING,
        sinks=sinks,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [MaskedVerifyInput, VirtualVerifyInput])
@pytest.mark.parametrize("window", [0, 1, 4, 15])
@pytest.mark.parametrize("seed", SEEDS)
def test_torch_backend_counts_a_window_in_positions(seed, window, kind):
    """Red if a suffix's window is counted in columns, or its sinks are left out."""
    case = make_pass(seed)
    sinks = torch.linspace(-1.0, 2.0, HEADS)
    result = torch_attention(kind, case, window, sinks)
    expected = case.oracle(window, sinks.tolist())
    assert (result - expected).abs().max() < TOLERANCE


def test_triton_backend_gives_the_oracles_attention():
    """Red if a suffix reads KV that is not in its request's row, or rows run over
    buffers sized by requests; under --enable-deterministic-inference too, and with
    latent KV. SGLang's own backend code and kernels, interpreted."""
    script = ROOT / "tests" / "support" / "triton_pass.py"
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    seeds = ["2", "7"]
    done = subprocess.run(
        [sys.executable, str(script), *seeds],
        capture_output=True,
        text=True,
        timeout=600,
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    deviations = json.loads(done.stdout.splitlines()[-1])
    assert len(deviations) == 3 * len(seeds) + 2
    assert max(deviations) < TOLERANCE


def test_virtual_sequences_cover_every_token_once_in_order():
    """Red if the flat order of tokens differs between the routes."""
    case = make_pass(5, num_requests=4)
    sequences = build_virtual_sequences(case.plan)
    assert sum(sequences.qo_lens) == case.plan.num_verify_tokens
    expected = []
    for i, (seq_len, num_draft, cuts, suffix_len) in enumerate(case.requests):
        expected.append((i, seq_len, num_draft + 1))
        expected += [(i, seq_len + 1 + cut, suffix_len) for cut in cuts]
    columns = (sequences.request, sequences.prefix_lens, sequences.qo_lens)
    assert list(zip(*columns, strict=True)) == expected


def test_mask_too_large_for_flashinfer_goes_the_virtual_way(monkeypatch):
    """Red if 32-bit offsets of a large mask overflow silently."""
    case = make_pass(1)
    args = (case.plan, case.slots, torch.tensor([0]))
    monkeypatch.setattr(registry, "MAX_MASK_CELLS", case.plan.num_mask_cells)
    assert isinstance(
        build_verify_input("mask", "flashinfer", *args), MaskedVerifyInput
    )
    monkeypatch.setattr(registry, "MAX_MASK_CELLS", case.plan.num_mask_cells - 1)
    large = build_verify_input("mask", "flashinfer", *args)
    assert isinstance(large, VirtualVerifyInput)


def test_triton_gets_the_pass_as_extends():
    """Red if Triton's verify mode, which knows one width per batch, gets a ragged
    pass, or another backend's spec input changes with it."""
    case = make_pass(2)
    args = (case.plan, case.slots, torch.tensor([0]))
    assert type(build_verify_input("virtual", "triton", *args)) is ExtendVerifyInput
    other = build_verify_input("virtual", "flashinfer", *args)
    assert type(other) is VirtualVerifyInput


def test_a_backend_that_cannot_verify_is_refused():
    """Red if a pass is put to a backend that was never tried."""
    with pytest.raises(ValueError, match="cannot verify on attention backend fa4"):
        backend_of("fa4")


def test_random_passes_are_not_all_alike():
    """Red if the seeds above stop covering empty drafts, suffixes and both together."""
    requests = [r for seed in SEEDS for r in make_pass(seed).requests]
    assert any(r[1] == 0 for r in requests)
    assert any(r[1] and not r[2] for r in requests)
    assert any(len(r[2]) > 1 for r in requests)
