"""Committed tokens -> DraftProposal: the draft model writes ahead.

The draft model shares the target's slot ids: its KV for a token lies in its own pool
at the slot the target uses (SGLang contract of the STANDALONE worker). Before it
drafts it forwards every committed position its KV lacks, cached prefixes included.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.moe.utils import draft_model_build_scope
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.draft_parallel import resolve_draft_parallel_layout
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context
from torch import Tensor

from sglang_parse.grammar import GrammarChain
from sglang_parse.sampling import draft_rows
from sglang_parse.startup import check_architecture

# Draft steps between two looks at the tokens on the host; each look costs a device
# synchronisation there and nothing on CPU.
STOP_CHECK_INTERVAL = {"cpu": 1}
DEFAULT_STOP_CHECK_INTERVAL = 8


@dataclass(frozen=True)
class DraftRequest:
    """One request's work order.

    row: its row of req_to_token. tokens: committed tokens, bonus and pending draft.
    num_cached: leading tokens whose draft KV is in the pool, less than len(tokens).
    num_new: tokens to draft. stop_ids: tokens that end the response.
    batch_index: its place in the round's sampling info. grammar: constrains the draft.
    """

    row: int
    tokens: Sequence[int]
    num_cached: int
    num_new: int
    stop_ids: frozenset[int]
    batch_index: int
    grammar: GrammarChain | None = None


@dataclass(frozen=True)
class DraftProposal:
    """tokens: newly drafted per request, the stop token excluded. ended: whether a
    stop token followed. num_forwarded: sequence positions with draft KV afterwards."""

    tokens: tuple[tuple[int, ...], ...]
    ended: tuple[bool, ...]
    num_forwarded: tuple[int, ...]


class DraftModel:
    """The draft model on the target's slots. Holds no per-request state."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, context_len: int
    ) -> None:
        self.layout = resolve_draft_parallel_layout(
            DraftParallelSpec(tp_execution=DraftTPExecution.TARGET_LAYOUT)
        )
        with (
            draft_tp_context(self.layout),
            draft_pp_context(),
            draft_model_build_scope(),
        ):
            self.worker = TpModelWorker(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                is_draft_worker=True,
                context_length=context_len,
            )
        self.runner = self.worker.model_runner
        check_architecture(self.runner.model_config, "--speculative-draft-model-path")
        device_type = torch.device(self.runner.device).type
        self.stop_check_interval = STOP_CHECK_INTERVAL.get(
            device_type, DEFAULT_STOP_CHECK_INTERVAL
        )

    def alloc_memory_pool(self, **kwargs: Any) -> None:
        with draft_tp_context(self.layout), draft_pp_context():
            self.worker.alloc_memory_pool(**kwargs)

    def init_attention_backends(self) -> None:
        plan_plain_decode(self.runner)
        with draft_tp_context(self.layout), draft_pp_context():
            self.worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        with draft_tp_context(self.layout), draft_pp_context():
            self.worker.init_cuda_graphs()

    def propose(
        self, requests: Sequence[DraftRequest], *, table: Tensor, sampling_info: Any
    ) -> DraftProposal:
        """Draft `num_new` tokens for each request, or fewer up to a stop token.

        table: req_to_token; columns [0, len(tokens) + num_new) of each row hold slots.
        """
        index = [r.batch_index for r in requests]
        sampling = draft_rows(sampling_info, index, table.device)
        with draft_tp_context(self.layout), draft_pp_context():
            return self._propose(requests, table, sampling)

    def _propose(
        self, requests: Sequence[DraftRequest], table: Tensor, sampling: Any
    ) -> DraftProposal:
        device = table.device
        rows = torch.tensor([r.row for r in requests], device=device)
        # Positions are kept on the host too, so that no step asks the device for them.
        position_cpu = torch.tensor([len(r.tokens) - 1 for r in requests])
        end_cpu = torch.tensor([len(r.tokens) + r.num_new - 2 for r in requests])
        position, end = position_cpu.to(device), end_cpu.to(device)
        max_new = max(r.num_new for r in requests)
        drafted: list[list[int]] = [[] for _ in requests]
        ended = [False] * len(requests)
        chains = [(i, r.grammar) for i, r in enumerate(requests) if r.grammar]
        interval = 1 if chains else self.stop_check_interval
        logits = self._catch_up(requests, rows, table)
        columns: list[Tensor] = []
        unread = 0
        pacer = StepPacer(device)
        input_ids = torch.tensor([r.tokens[-1] for r in requests], device=device)
        for step in range(max_new):
            for i, chain in chains:
                if len(drafted[i]) < requests[i].num_new and not ended[i]:
                    chain.mask_next(logits[i : i + 1])
            columns.append(self._sample(logits, position, sampling))
            if step + 1 - unread >= interval or step + 1 == max_new:
                done = _read_back(columns[unread:], requests, drafted, ended)
                unread = len(columns)
                if done:
                    break
            # A request at the end of its window repeats its last step in place.
            input_ids = torch.where(position < end, columns[-1], input_ids)
            position = torch.minimum(position + 1, end)
            position_cpu = torch.minimum(position_cpu + 1, end_cpu)
            pacer.wait()
            logits = self._decode(input_ids, rows, position, position_cpu, table)
            pacer.mark()
        steps = len(columns)
        return DraftProposal(
            tokens=tuple(tuple(t) for t in drafted),
            ended=tuple(ended),
            num_forwarded=tuple(
                len(r.tokens) + min(steps, r.num_new) - 1 for r in requests
            ),
        )

    def _catch_up(
        self, requests: Sequence[DraftRequest], rows: Tensor, table: Tensor
    ) -> Tensor:
        """Forward the tokens the draft has no KV for; logits [bs, vocab] at the last.

        Unrotated ids at true positions (unlike EAGLE's draft extend).
        """
        device = table.device
        prefix = [r.num_cached for r in requests]
        lens = [len(r.tokens) - r.num_cached for r in requests]
        ids = [t for r in requests for t in r.tokens[r.num_cached :]]
        positions = [p for r in requests for p in range(r.num_cached, len(r.tokens))]
        seq_lens = [len(r.tokens) for r in requests]
        lens_t = torch.tensor(lens, dtype=torch.int32, device=device)
        slots = [
            table[r.row, n : n + k]
            for r, n, k in zip(requests, prefix, lens, strict=True)
        ]
        batch = self._forward_batch(
            ForwardMode.EXTEND,
            input_ids=torch.tensor(ids, dtype=torch.int64, device=device),
            rows=rows,
            positions=torch.tensor(positions, dtype=torch.int64, device=device),
            out_cache_loc=torch.cat(slots).to(torch.int64),
            seq_lens=torch.tensor(seq_lens, dtype=torch.int64, device=device),
            seq_lens_cpu=torch.tensor(seq_lens),
        )
        batch.extend_num_tokens = len(ids)
        batch.extend_seq_lens = lens_t
        batch.extend_prefix_lens = torch.tensor(
            prefix, dtype=torch.int32, device=device
        )
        batch.extend_start_loc = torch.cumsum(lens_t, 0, dtype=torch.int32) - lens_t
        batch.extend_seq_lens_cpu = lens
        batch.extend_prefix_lens_cpu = prefix
        batch.extend_logprob_start_lens_cpu = lens
        return self._forward(batch)

    def _decode(
        self,
        input_ids: Tensor,
        rows: Tensor,
        position: Tensor,
        position_cpu: Tensor,
        table: Tensor,
    ) -> Tensor:
        """One draft step: token `input_ids` at `position`; logits [bs, vocab].

        Reads nothing back: its tokens stay on the device, its lengths are known on the
        host. A captured graph runs it where there is one.
        """
        return self._forward(
            self._forward_batch(
                ForwardMode.DECODE,
                input_ids=input_ids,
                rows=rows,
                positions=position,
                out_cache_loc=table[rows, position].to(torch.int64),
                seq_lens=position + 1,
                seq_lens_cpu=position_cpu + 1,
            )
        )

    def _forward_batch(
        self,
        mode: ForwardMode,
        *,
        input_ids: Tensor,
        rows: Tensor,
        positions: Tensor,
        out_cache_loc: Tensor,
        seq_lens: Tensor,
        seq_lens_cpu: Tensor,
    ) -> ForwardBatch:
        batch = ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=input_ids,
            req_pool_indices=rows,
            seq_lens=seq_lens,
            out_cache_loc=out_cache_loc,
            seq_lens_sum=int(seq_lens_cpu.sum()),
            seq_lens_cpu=seq_lens_cpu,
            positions=positions,
            spec_algorithm=SpeculativeAlgorithm.NONE,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
            global_num_token_non_padded_cpu=len(input_ids),
        )
        self.runner.kv_index_translator.bind_own_plan(batch)
        return batch

    def _forward(self, batch: ForwardBatch) -> Tensor:
        return self.runner.forward(batch).logits_output.next_token_logits

    def _sample(self, logits: Tensor, position: Tensor, sampling: Any) -> Tensor:
        """[bs] int64 draft tokens, by the request's own sampling parameters."""
        if sampling.is_all_greedy:
            return logits.argmax(dim=-1)
        output = LogitsProcessorOutput(next_token_logits=logits)
        sampler = self.runner.sampler
        return sampler(output, sampling, False, [], [], position).to(torch.int64)


class StepPacer:
    """Keeps the host one draft step ahead of the device, not more.

    One step ahead keeps the device busy. FlashInfer stages the plan of a captured
    step in one page-locked buffer per batch size (flashinfer/decode.py,
    `fast_decode_plan`); planned again before it is copied, a step would attend by the
    plan of a later one. Nothing to pace on CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = None if device.type == "cpu" else torch.get_device_module(device)
        self._running: deque[Any] = deque()

    def wait(self) -> None:
        """Before a step: until the step before the last has finished."""
        if len(self._running) > 1:
            self._running.popleft().synchronize()

    def mark(self) -> None:
        """After a step is launched."""
        if self._device is not None:
            event = self._device.Event()
            event.record()
            self._running.append(event)


def plan_plain_decode(runner: Any) -> None:
    """Have a runner capture ordinary decode steps as CUDA graphs.

    Under a speculative algorithm SGLang captures the target's decode graph as a verify
    pass of one width for all, for which a registered algorithm has no input, and none
    for a draft model (decode_cuda_graph_runner.py, `__init__`, `get_spec_info`). Call
    it once the pools are allocated, before graphs are captured. What the runners run
    carries its own algorithm (`ForwardBatch.spec_algorithm`).
    """
    runner.spec_algorithm = SpeculativeAlgorithm.NONE


def _read_back(
    columns: list[Tensor],
    requests: Sequence[DraftRequest],
    drafted: list[list[int]],
    ended: list[bool],
) -> bool:
    """Append unread columns to `drafted` up to each stop token; True if all are done.

    The only device-to-host copy of the draft loop.
    """
    tokens = torch.stack(columns, dim=1).tolist()
    for i, request in enumerate(requests):
        for token in tokens[i]:
            if ended[i] or len(drafted[i]) >= request.num_new:
                break
            if token in request.stop_ids:
                ended[i] = True
            else:
                drafted[i].append(token)
                if request.grammar is not None:
                    request.grammar.advance(token)
    return all(
        e or len(d) >= r.num_new
        for e, d, r in zip(ended, drafted, requests, strict=True)
    )
