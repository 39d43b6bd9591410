"""Every attention backend that serves PARSE under every change made while it runs.

The backends are SGLang's own objects, built on a CPU. Their constructors need a GPU, so
the attributes that these would set are written here; the state of captured decode steps
comes from SGLang's `init_cuda_graph_state` and is stored by SGLang's own code.
"""

from __future__ import annotations

import importlib
import sys
from contextlib import ExitStack, nullcontext
from types import ModuleType, SimpleNamespace
from typing import Any

import flashinfer
import pytest
import torch
from flashinfer.decode import fast_decode_plan
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.runtime_context import get_parallel
from torch.overrides import TorchFunctionMode

from sglang_parse.sgl.compat.backend_changes import (
    _part_of_two,
    holds_pass,
)
from sglang_parse.sgl.graphs import PassGraphs
from sglang_parse.sgl.pacing import StepPacer
from sglang_parse.verify.backends.routes import backend_of
from tests.unit.sgl.test_pacing import lagging  # noqa: F401

pytestmark = pytest.mark.usefixtures("plugins")
MAX_BS, CONTEXT, SIZES = 4, 8, (1, 2, 4)
#: Sequences of the pass: more than any buffer has entries.
NUM_SEQUENCES = 3 * MAX_BS
FOLDER = "sglang.srt.layers.attention"


class OnCpu(TorchFunctionMode):
    """Ordinary memory where CUDA or page-locked memory is requested."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if str(kwargs.get("device", "")).startswith("cuda"):
            kwargs["device"] = "cpu"
        if "pin_memory" in kwargs:
            kwargs["pin_memory"] = False
        return func(*args, **kwargs)


class Planner:
    """The compiled planner of a wrapper: keeps which buffer each plan is staged in."""

    def __init__(self) -> None:
        self.staged: list[int] = []

    def plan(self, floats, ints, page_locked, *rest) -> list[int]:
        self.staged.append(page_locked.data_ptr())
        return []


def offsets() -> torch.Tensor:
    return torch.zeros(MAX_BS + 1, dtype=torch.int32)


def make(module: str, name: str, **attributes: Any) -> Any:
    """An object of SGLang's class with what its constructor would have set."""
    cls = getattr(importlib.import_module(f"{FOLDER}.{module}"), name)
    backend = cls.__new__(cls)
    vars(backend).update(max_context_len=CONTEXT, device="cpu", skip_prefill=False)
    vars(backend).update(attributes, decode_cuda_graph_metadata={}, planners=[])
    return backend


def captured_step(bs: int) -> SimpleNamespace:
    lens = torch.full((bs,), 3)
    return SimpleNamespace(
        batch_size=bs, forward_mode=ForwardMode.DECODE, positions=lens, seq_lens=lens,
        seq_lens_cpu=lens, seq_lens_sum=3 * bs, req_pool_indices=torch.arange(bs),
        encoder_lens=None, spec_info=None, kv_loc_plan=None,
    )  # fmt: skip


class Updater:
    """Plans the steps of a FlashInfer backend without its kernel for indices."""

    def __init__(self, backend: Any) -> None:
        self.backend = backend

    def update(self, lens, *_, decode_wrappers=None, decode_wrapper=None, **more):
        for wrapper in decode_wrappers or [decode_wrapper]:
            if not hasattr(wrapper, "planner"):
                self._first_plan(wrapper)
            elif decode_wrappers:
                wrapper.begin_forward(
                    offsets()[: len(lens) + 1], torch.zeros(0), lens,
                    4, 4, 64, 1, q_data_type=torch.float16, kv_data_type=torch.float16,
                )  # fmt: skip
            elif more["init_metadata_replay"]:
                plan = {k: more[k] for k in ("qo_indptr_cpu", "kv_indptr_cpu")}
                wrapper.plan(
                    **plan, kv_indices=None, kv_len_arr_cpu=more["kv_len_arr_cpu"],
                    num_heads=4, head_dim_ckv=512, head_dim_kpe=64, page_size=1,
                    causal=False, sm_scale=1.0, q_data_type=torch.float16,
                    kv_data_type=torch.float16,
                )  # fmt: skip

    def _first_plan(self, wrapper: Any) -> None:
        """What a wrapper's own plan leaves behind, without a kernel to compile."""
        wrapper.planner = Planner()
        self.backend.planners.append(wrapper.planner)
        if hasattr(wrapper, "_publish_backend_mirrors"):
            found = SimpleNamespace(_int_workspace_buffer=torch.empty(8))
            found._pin_memory_int_workspace_buffer = torch.empty(8, pin_memory=True)
            found._cached_module = wrapper.planner
            wrapper._publish_backend_mirrors(found)
        wrapper._cached_module, wrapper._backend = wrapper.planner, "fa2"


def flashinfer_backend(num_wrappers: int = 1) -> Any:
    last_pages = torch.ones(MAX_BS, dtype=torch.int32)
    backend = make(
        "flashinfer_backend",
        "FlashInferAttnBackend",
        num_wrappers=num_wrappers,
        use_sliding_window_kv_pool=False,
        disable_cuda_graph_kv_split=False,
        kv_indptr=[offsets() for _ in range(num_wrappers)],
        kv_last_page_len=last_pages,
        workspace_buffer=torch.zeros(1 << 10, dtype=torch.uint8),
        # Words under the names of a pair's parts.
        prefill_backend="fa2",
        decode_backend="fa2",
        decode_use_tensor_cores=True,
        dispatch_reason=None,
        indices_updater_prefill=SimpleNamespace(kv_last_page_len=last_pages),
    )
    backend.indices_updater_decode = Updater(backend)
    return backend


def flashinfer_mla() -> Any:
    backend = make(
        "flashinfer_mla_backend",
        "FlashInferMLAAttnBackend",
        workspace_buffer=torch.zeros(1 << 10, dtype=torch.uint8),
        q_indptr_decode=torch.arange(MAX_BS + 1, dtype=torch.int32),
        kv_indptr=offsets(),
        indices_updater_prefill=SimpleNamespace(),
    )
    backend.indices_updater_decode = Updater(backend)
    return backend


def triton() -> Any:
    return make(
        "triton_backend",
        "TritonAttnBackend",
        dllm_attention=None,
        num_head=2,
        max_kv_splits=2,
        v_head_dim=4,
        swa_v_head_dim=None,
        lean_total_programs=1,
        lean_block_m=1,
        is_draft_runner=True,
        num_draft_tokens=2,
        sliding_window_size=4,
        use_sliding_window_kv_pool=False,
        kv_indptr=offsets(),
        qo_indptr=offsets(),
        window_kv_indptr=offsets(),
    )


def fa3() -> Any:
    return make(
        "flashattention_backend",
        "FlashAttentionBackend",
        page_size=1,
        is_draft_runner=True,
        use_mla=False,
        _get_scheduler_metadata=None,
        local_attn_builder=None,
        use_sliding_window_kv_pool=False,
        is_prefill_aware_swa=False,
        is_encoder_decoder=False,
        speculative_num_draft_tokens=2,
        topk=1,
        req_to_token_pool=SimpleNamespace(req_to_token=torch.zeros(MAX_BS, CONTEXT)),
    )


def pair(prefill: Any, decode: Any) -> Any:
    module = importlib.import_module(f"{FOLDER}.hybrid_attn_backend")
    backend = module.HybridAttnBackend.__new__(module.HybridAttnBackend)
    backend.prefill_backend, backend.decode_backend = prefill, decode
    return backend


def capture(steps: Any) -> None:
    """Captured steps of all sizes, stored as SGLang stores them."""
    steps.init_cuda_graph_state(MAX_BS, MAX_BS)
    for bs in SIZES:
        if hasattr(steps, "indices_updater_decode"):
            steps.init_forward_metadata_out_graph(captured_step(bs), in_capture=True)
        elif hasattr(steps, "_bind_metadata_buffers"):
            steps._bind_metadata_buffers(bs, bs, None, ForwardMode.DECODE, None, "cpu")


# Name of the prefill backend in PARSE's registry, and what makes the backend.
MATRIX = {
    "flashinfer": ("flashinfer", flashinfer_backend),
    "flashinfer, windows": ("flashinfer", lambda: flashinfer_backend(2)),
    "flashinfer, latent": ("flashinfer", flashinfer_mla),
    "triton": ("triton", triton),
    "fa3": ("fa3", fa3),
    "fa3 before flashinfer": ("fa3", lambda: pair(fa3(), flashinfer_backend())),
    "flashinfer before fa3": ("flashinfer", lambda: pair(flashinfer_backend(), fa3())),
    "triton before latent": ("triton", lambda: pair(triton(), flashinfer_mla())),
}


@pytest.fixture(params=MATRIX)
def found(request, monkeypatch):
    """(name of its registry row, attention backend with captured decode steps)."""
    if "sgl_kernel" not in sys.modules:
        kernels = ModuleType("sgl_kernel")
        kernels.merge_state_v2 = None  # for FlashAttention 3, which is not run here
        monkeypatch.setitem(sys.modules, "sgl_kernel", kernels)
    for name, wrapper in (
        ("flashinfer_backend", "BatchDecodeWithPagedKVCacheWrapper"),
        ("flashinfer_mla_backend", "BatchMLAPagedAttentionWrapper"),
    ):
        module = importlib.import_module(f"{FOLDER}.{name}")
        monkeypatch.setattr(
            module, wrapper, getattr(flashinfer, wrapper), raising=False
        )
        if name == "flashinfer_backend":
            monkeypatch.setattr(module, "fast_decode_plan", fast_decode_plan, False)
    monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
    name, build = MATRIX[request.param]
    with OnCpu(), get_parallel().override(dcp_enabled=False):
        backend = build()
        capture(_part_of_two(backend, "decode_backend"))
        yield name, backend


def test_each_captured_step_is_planned_in_the_other_buffer(found, lagging):  # noqa: F811
    """Red if steps of a backend cannot be paced, which would end the server at the
    first one, or if two steps in a row stage their plans in the same memory."""
    _, backend = found
    steps = _part_of_two(backend, "decode_backend")
    planners = getattr(steps, "planners", [])
    for planner in planners:
        planner.staged.clear()
    pacer = StepPacer(SimpleNamespace(device="cuda", attn_backend=backend))
    for _ in range(4):
        pacer.wait()
        if planners:
            for bs in SIZES:
                steps.init_forward_metadata_out_graph(captured_step(bs))
        pacer.mark()
    assert lagging.waits == 2
    assert len(planners) == len(SIZES) * getattr(steps, "num_wrappers", bool(planners))
    for planner in planners:
        one, other, *again = planner.staged
        assert one != other and again == [one, other]


def prefill_graphs(backend: Any) -> Any:
    """SGLang's runner of prefill graphs beside `backend`; it runs no graph here."""
    module = importlib.import_module(
        "sglang.srt.model_executor.runner.prefill_cuda_graph_runner"
    )
    graphs = module.PrefillCudaGraphRunner.__new__(module.PrefillCudaGraphRunner)
    captured = backend.use_captured_forward_metadata_for_breakable_cuda_graph
    can_run = getattr(backend, "can_run_prefill_cuda_graph", None)
    vars(graphs).update(
        prefill_backend_name="breakable",
        model_runner=SimpleNamespace(attn_backend=backend),
        use_captured_attn_metadata=captured,
        _backend_can_run_prefill_cuda_graph=can_run,
        _is_full_backend=False,
        has_mha_companion_layers=False,
        _capture_chunked_prefix=False,
        capture_hidden_mode=CaptureHiddenMode.FULL,
        max_context_size=None,
        max_seq_len=None,
        max_num_tokens=64,
        capture_num_tokens=[32, 64],
        _prefill_static_buffers={"seq_lens": torch.zeros(MAX_BS)},
    )
    return graphs


def state_of(backend: Any) -> dict[str, Any]:
    """What a pass may change, of both parts of a pair."""
    parts = [backend, _part_of_two(backend, "prefill_backend")]
    parts.append(getattr(parts[1], "indices_updater_prefill", parts[1]))
    return {
        f"{i}.{k}": v for i, part in enumerate(parts) for k, v in vars(part).items()
    }


def test_a_pass_finds_room_for_its_sequences_and_leaves_no_trace(found):
    """Red if a pass cannot run beside the captured steps of a backend, is not replayed
    by a prefill graph, or leaves the backend or the graphs changed."""
    name, backend = found
    graphs, decode = prefill_graphs(backend), object()
    runner = SimpleNamespace(
        device="cuda", prefill_cuda_graph_runner=graphs, decode_cuda_graph_runner=decode
    )
    before = state_of(backend), dict(vars(graphs))
    rows = backend_of(name)
    table = torch.zeros(NUM_SEQUENCES, CONTEXT) if "rows" in rows.inputs else None
    batch = SimpleNamespace(
        batch_size=NUM_SEQUENCES, input_ids=torch.zeros(30),
        seq_lens_cpu=torch.arange(NUM_SEQUENCES), extend_prefix_lens_cpu=[1],
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )  # fmt: skip
    reads = _part_of_two(backend, "prefill_backend")
    with ExitStack() as stack:
        stack.enter_context(PassGraphs(runner).serve(batch))
        stack.enter_context(
            holds_pass(backend, rows.buffers, num_sequences=NUM_SEQUENCES, table=table)
        )
        assert runner.decode_cuda_graph_runner is None
        assert runner.prefill_cuda_graph_runner.can_run_graph(batch)
        assert len(graphs._prefill_static_buffers["seq_lens"]) == NUM_SEQUENCES
        for one in rows.buffers:
            owner = getattr(reads, one.owner) if one.owner else reads
            buffer = getattr(owner, one.name, None)
            assert buffer is None or len(buffer) == NUM_SEQUENCES + one.num_extra
        if table is not None:
            assert reads.req_to_token_pool.req_to_token is table
    assert runner.decode_cuda_graph_runner is decode
    after = state_of(backend), dict(vars(graphs))
    for old, new in zip(before, after, strict=True):
        assert old.keys() == new.keys()
        assert [k for k in old if old[k] is not new[k]] == []
