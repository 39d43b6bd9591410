"""A PARSE pair in this process, without scheduler or HTTP: forwards by hand.

Built as SGLang's scheduler builds it (sglang/srt/managers/scheduler.py, `__init__` and
`init_model_worker`), so that backends, pools and captured graphs are the server's.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

import torch

from sglang_parse.cpu.entry import SWITCH_ENV

VERDICT_TOKEN = (
    5  # any id of the embedded tokenizer; drafts and suffixes are made of it
)


class Engine:
    """Target, draft and verify passes over rows of a KV pool that are all filled."""

    def __init__(self, args: Sequence[str]) -> None:
        os.environ.setdefault(SWITCH_ENV, "1")  # read when SGLang is imported
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang.srt.arg_groups.overrides import resolving_view
        from sglang.srt.configs.model_config import ModelConfig
        from sglang.srt.distributed import bootstrap
        from sglang.srt.layers.moe import initialize_moe_config
        from sglang.srt.layers.quantization.fp8_utils import initialize_fp8_gemm_config
        from sglang.srt.layers.quantization.unquant import initialize_bf16_gemm_config
        from sglang.srt.managers.tp_worker import TpModelWorker
        from sglang.srt.runtime_context import (
            SpawnRanks,
            get_device,
            publish,
            spawn_world_rank,
        )
        from sglang.srt.server_args import PortArgs, prepare_server_args

        from sglang_parse.plugin.worker import ParseWorker

        server_args = prepare_server_args(list(args))
        server_args.resolve_once()
        self.args = resolving_view(server_args)
        ports = PortArgs.init_new(server_args)
        rank = spawn_world_rank(server_args, tp_rank=0, pp_rank=0)
        publish(
            server_args,
            role="scheduler",
            ranks=SpawnRanks(world_rank=rank, gpu_id=0),
        )
        initialize_moe_config()
        initialize_fp8_gemm_config()
        initialize_bf16_gemm_config()
        bootstrap.init_parallel_runtime(
            server_args=server_args,
            device=get_device().device,
            dist_port=ports.nccl_port,
        )
        bootstrap.init_layer_runtime(
            model_config=ModelConfig.from_server_args(server_args)
        )
        self.target = TpModelWorker(
            server_args=server_args, gpu_id=0, nccl_port=ports.nccl_port
        )
        self.parse = ParseWorker(
            server_args=server_args,
            gpu_id=0,
            nccl_port=ports.nccl_port,
            target_worker=self.target,
        )
        runner = self.target.model_runner
        runner.account_preloaded_weights(
            self.target.preloaded_weights_bytes + self.parse.preloaded_weights_bytes
        )
        self.target.alloc_memory_pool(
            draft_parallel_layout=self.parse.draft_parallel_layout
        )
        self.pool, self.allocator = self.target.get_memory_pool()
        self.parse.alloc_memory_pool(
            memory_pool_config=runner.memory_pool_config,
            req_to_token_pool=self.pool,
            token_to_kv_pool_allocator=self.allocator,
        )
        self.target.init_attention_backends()
        self.parse.init_attention_backends()
        self.target.init_cuda_graphs()
        self.parse.init_cuda_graphs()
        self.parse.prewarm_sampling()
        self.runner = runner
        self.device = torch.device(runner.device)

    @property
    def draft_model(self) -> Any:
        """The draft model (`drafting.draft_model.DraftModel`)."""
        return next(d.model for d in self.parse.parts.drafters if d.name == "model")

    @property
    def table(self) -> torch.Tensor:
        return self.pool.req_to_token

    def synchronize(self) -> None:
        if self.device.type != "cpu":
            torch.get_device_module(self.device).synchronize()

    def fill_kv(self) -> None:
        """Random keys and values in both pools, so that who sees what shows."""
        for runner in (self.runner, self.draft_model.runner):
            pool = runner.token_to_kv_pool
            for buffer in (*pool.k_buffer, *pool.v_buffer):
                buffer.normal_()

    def fill_rows(self, bs: int, width: int) -> torch.Tensor:
        """[bs] rows whose first `width` columns have slots; takes back earlier ones."""
        self.allocator.clear()
        slots = self.allocator.alloc(bs * width)
        if slots is None:
            raise RuntimeError(
                f"{bs} x {width} tokens do not fit the KV pool of "
                f"{self.allocator.size}; lower the context or the batch."
            )
        self.table[1 : bs + 1, :width] = slots.view(bs, width).to(self.table.dtype)
        return torch.arange(1, bs + 1, device=self.device)

    def scratch(self, num_slots: int) -> torch.Tensor:
        slots = self.allocator.alloc(num_slots)
        if slots is None:
            raise RuntimeError(
                f"{num_slots} more slots do not fit the KV pool of "
                f"{self.allocator.size}; lower the context or the window."
            )
        return slots.to(torch.int64)

    # -- Forwards ----------------------------------------------------------------

    def decode(self, rows: torch.Tensor, context: int) -> None:
        """One plain decode step of the target: `context` tokens and a new one."""
        bs = len(rows)
        on_host = torch.full((bs,), context)
        self.parse.parts.verifier.decode(
            input_ids=torch.full((bs,), VERDICT_TOKEN, device=self.device),
            req_pool_indices=rows,
            seq_lens=on_host.to(self.device),
            seq_lens_cpu=on_host,
            table=self.table,
            return_hidden_states=False,
        )

    def draft(self, rows: torch.Tensor, context: int, num_new: int) -> None:
        """A draft of `num_new` tokens after one token of catch-up, all greedy."""
        from sglang_parse.drafting.lanes import DraftPhase

        self.draft_model.propose(
            self.draft_requests(rows, context, num_new),
            table=self.table,
            sampling_info=self.greedy_sampling(len(rows)),
            phase=DraftPhase(),
        )

    def draft_requests(self, rows: torch.Tensor, context: int, num_new: int) -> Any:
        """Requests of the draft model that have read `context` tokens of one more."""
        from sglang_parse.drafting.lanes import DraftRequest

        return [
            DraftRequest(
                row=row,
                tokens=[VERDICT_TOKEN] * (context + 1),
                num_cached=context,
                num_new=num_new,
                stop_ids=frozenset(),
                batch_index=i,
            )
            for i, row in enumerate(rows.tolist())
        ]

    def greedy_sampling(self, bs: int) -> Any:
        """SGLang's sampling parameters of a batch of so many greedy requests."""
        from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

        ones = torch.ones(bs, device=self.device)
        return SamplingBatchInfo(
            temperatures=ones.view(-1, 1),
            top_ps=ones,
            top_ks=ones.to(torch.int32),
            min_ps=ones,
            is_all_greedy=True,
            is_any_greedy=True,
            need_top_p_sampling=False,
            need_top_k_sampling=False,
            need_min_p_sampling=False,
            vocab_size=self.runner.model_config.vocab_size,
            device=str(self.device),
        )

    def verify_plan(
        self, bs: int, context: int, window: int, num_segments: int, suffix_len: int
    ) -> Any:
        """`num_segments` segments of equal length over a draft of `window` tokens."""
        from sglang_parse.verify.layout import PassRequest, build_verify_plan

        cuts = boundaries_of(window, num_segments)
        request = PassRequest(
            seq_len=context,
            bonus_token=VERDICT_TOKEN,
            draft_tokens=[VERDICT_TOKEN] * window,
            boundaries=tuple(cuts),
            suffix=(VERDICT_TOKEN,) * suffix_len,
        )
        return build_verify_plan([request] * bs)

    def verify(
        self, plan: Any, rows: torch.Tensor, scratch: torch.Tensor, route: str
    ) -> torch.Tensor:
        """One pass by `route`; logits at the verdict rows."""
        output = self.parse.parts.verifier.verify_by(
            route,
            plan,
            rows=rows.tolist(),
            req_pool_indices=rows,
            scratch=scratch,
            table=self.table,
        )
        return output.logits

    def prefill(
        self,
        rows: torch.Tensor,
        prefix_lens: Sequence[int],
        lens: Sequence[int],
        slots: torch.Tensor,
    ) -> torch.Tensor:
        """An ordinary prefill: sequence i reads `prefix_lens[i]` columns of rows[i]
        and adds lens[i] tokens; logits at the last of each.

        slots: [sum(lens)], where their KV goes, and in rows behind the prefixes.
        """
        from sglang.srt.model_executor.forward_batch_info import (
            CaptureHiddenMode,
            ForwardBatch,
            ForwardMode,
        )

        from sglang_parse.verify.backends.verify_backend import (
            length_fields,
            running_offsets,
        )

        starts = running_offsets(lens, self.device)
        seq_lens = [p + n for p, n in zip(prefix_lens, lens, strict=True)]
        positions = [
            torch.arange(p, p + n) for p, n in zip(prefix_lens, lens, strict=True)
        ]
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            batch_size=len(lens),
            input_ids=torch.full((sum(lens),), VERDICT_TOKEN, device=self.device),
            req_pool_indices=rows,
            out_cache_loc=slots,
            positions=torch.cat(positions).to(self.device),
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
            global_num_token_non_padded_cpu=sum(lens),
            extend_num_tokens=sum(lens),
            extend_seq_lens=starts[1:] - starts[:-1],
            extend_prefix_lens=torch.tensor(
                prefix_lens, dtype=torch.int32, device=self.device
            ),
            extend_start_loc=starts[:-1],
            extend_seq_lens_cpu=list(lens),
            extend_prefix_lens_cpu=list(prefix_lens),
            extend_logprob_start_lens_cpu=list(lens),
            **length_fields(seq_lens, self.device),
        )
        self.runner.kv_index_translator.bind_own_plan(batch)
        result = self.target.forward_batch_generation(
            batch=None, forward_batch=batch, is_verify=True
        )
        return result.logits_output.next_token_logits


def boundaries_of(window: int, num_segments: int) -> list[int]:
    """Ends of `num_segments` segments of a draft, the last at its end."""
    return [window * (k + 1) // num_segments for k in range(num_segments)]
