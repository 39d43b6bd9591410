"""A short pass through SGLang's own backend of sparse attention, as far as a CPU goes.

Run by test_sparse_attention.py in a process of its own with TRITON_INTERPRET=1, so that
SGLang's kernel for captured steps is interpreted. Prints one line of JSON: for a step
without a graph and for one that is captured, what each row of a pass would read.
"""

from __future__ import annotations

import json
import sys
from types import SimpleNamespace
from typing import Any

import torch
from sglang.srt.layers.attention import dsa_backend
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.runtime_context import get_parallel
from torch.overrides import TorchFunctionMode

from sglang_parse.requests.round_records import Round
from sglang_parse.sgl.fast_paths import FastPaths
from sglang_parse.verify.layout import PassRequest, build_verify_plan
from sglang_parse.verify.passes import TargetVerifier
from sglang_parse.verify.short_passes import ShortPasses

#: Page of the table and of the index, tokens that it selects, and pages of a row.
PAGE, TOPK, PAGES = 64, 100, 5
#: Row of req_to_token, tokens before the bonus token, and draft tokens of each request.
REQUESTS = ((3, 62, 4), (1, 5, 0), (6, 190, 3))
MAX_ROWS = 12


class AsIfOnCuda(TorchFunctionMode):
    """Tensors say that they are on a CUDA device, where a launcher asks."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func == torch.Tensor.is_cuda.__get__:
            return True
        return func(*args, **(kwargs or {}))


def table() -> torch.Tensor:
    """[8, PAGES * PAGE] slots: each row's pages, which lie anywhere in the pool."""
    draw = torch.Generator().manual_seed(5)
    pages = 1 + torch.randperm(8 * PAGES, generator=draw).view(8, PAGES, 1)
    return (pages * PAGE + torch.arange(PAGE)).flatten(1).to(torch.int32)


def make_backend(rows: torch.Tensor) -> Any:
    """SGLang's backend with what its constructor would set on a GPU with BF16 KV."""
    cls = dsa_backend.DeepseekSparseAttnBackend
    backend = cls.__new__(cls)
    pool = SimpleNamespace(req_to_token=rows)
    vars(backend).update(
        device="cpu", req_to_token=rows, req_to_token_pool=pool, dsa_index_topk=TOPK,
        dsa_index_kpool=1, physical_page_size=PAGE, speculative_num_draft_tokens=4,
        dsa_prefill_impl="flashmla_sparse", dsa_decode_impl="fa3", _kv_shard_pool=None,
        enable_auto_select_prefill_impl=False, dsa_kv_cache_store_fp8=False,
        hisparse_coordinator=None, use_fused_topk=True, dcp_size=1,
        dsa_topk_backend=SimpleNamespace(should_use_topk_v2=lambda: False),
        _memory_saver_adapter=dsa_backend.TorchMemorySaverAdapter.create(enable=False),
        _arange_buf=torch.arange(64, dtype=torch.int32),
        _is_in_breakable_cuda_graph=lambda: False,
        _is_in_tc_piecewise_cuda_graph=lambda: False,
        _get_device_sm=lambda: 90, _is_blackwell=lambda: False,
    )  # fmt: skip
    backend._init_kpool_metadata_fusion()
    return backend


def batch_of_pass(rows: torch.Tensor) -> Any:
    """The ForwardBatch that PARSE makes of a pass over these requests."""
    made: list[Any] = []
    runner = SimpleNamespace(
        device="cpu",
        model_config=SimpleNamespace(model_is_mrope=False),
        server_args=SimpleNamespace(ep_size=1),
        kv_index_translator=SimpleNamespace(bind_own_plan=lambda batch: None),
        prefill_attention_backend_str="dsa",
    )

    def forward(*, batch, forward_batch, is_verify):
        made.append(forward_batch)
        states = torch.zeros(forward_batch.batch_size, 1)
        output = SimpleNamespace(next_token_logits=states, hidden_states=None)
        return SimpleNamespace(logits_output=output)

    verifier = TargetVerifier.__new__(TargetVerifier)
    vars(verifier).update(
        runner=runner, paths=FastPaths(), spec_algorithm=None, shown=None,
        shows_features=False,
        target_worker=SimpleNamespace(forward_batch_generation=forward),
    )  # fmt: skip
    runner.decode_cuda_graph_runner = None
    plan = build_verify_plan(
        [PassRequest(n, 1, list(range(2, 2 + k)), (), ()) for _, n, k in REQUESTS]
    )
    batch = SimpleNamespace(
        reqs=[None] * len(REQUESTS),
        req_pool_indices=torch.tensor([row for row, _, _ in REQUESTS]),
        return_hidden_states=False,
    )
    slots = SimpleNamespace(table=rows)
    ShortPasses(verifier, slots).run(Round(batch, []), plan)  # type: ignore[arg-type]
    return made[0]


def what_rows_read(metadata: Any, num: int) -> dict[str, Any]:
    """Of the first `num` rows: tokens that the index scores, tokens that attention
    reads, and the pages in which both lie."""
    lens = metadata.cache_seqlens_int32[:num].tolist()
    pages = [
        metadata.real_page_table[i, : -(-n // PAGE)].tolist()
        for i, n in enumerate(lens)
    ]
    return {
        "lens": lens,
        "selected": metadata.dsa_cache_seqlens_int32[:num].tolist(),
        "pages": pages,
        "queries": metadata.max_seq_len_q,
    }


def captured(backend: Any, batch: Any) -> tuple[Any, list[int]]:
    """What a replay reads, where another batch was captured; and the lengths by which
    SGLang divides the scores of the index between blocks."""
    seen: list[int] = []

    def schedule(lens: torch.Tensor, block: int, num_blocks: int) -> torch.Tensor:
        assert lens.shape == (MAX_ROWS, 1)
        seen[:] = lens.flatten().tolist()
        return torch.zeros(2)

    dsa_backend.is_cuda = lambda: True
    dsa_backend.resolve_paged_mqa_logits_metadata_fn = lambda: schedule
    dsa_backend.resolve_num_sms = lambda: 1
    backend.init_cuda_graph_state(MAX_ROWS, MAX_ROWS)

    def step(rows: torch.Tensor, lens: torch.Tensor) -> None:
        static = SimpleNamespace(
            batch_size=MAX_ROWS, req_pool_indices=rows, seq_lens=lens,
            seq_lens_cpu=lens, forward_mode=ForwardMode.DECODE, spec_info=None,
        )  # fmt: skip
        backend.init_forward_metadata_out_graph(static)

    step(torch.zeros(MAX_ROWS, dtype=torch.int64), torch.ones(MAX_ROWS).long())
    missing = MAX_ROWS - batch.batch_size
    with AsIfOnCuda():
        step(
            torch.nn.functional.pad(batch.req_pool_indices, (0, missing)),
            torch.nn.functional.pad(batch.seq_lens, (0, missing), value=1),
        )
    return backend.forward_metadata, seen


def main() -> None:
    rows = table()
    batch, backend = batch_of_pass(rows), make_backend(rows)
    num = batch.batch_size
    with get_parallel().override(attn_cp_size=1, dcp_enabled=False):
        backend.init_forward_metadata(batch)
        found = {"eager": what_rows_read(backend.forward_metadata, num)}
        metadata, scheduled = captured(backend, batch)
    found["captured"] = what_rows_read(metadata, num)
    found["captured"]["scheduled"] = scheduled[:num]
    found["written"] = batch.out_cache_loc.tolist()
    found["positions"] = batch.positions.tolist()
    sys.stdout.write(json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
