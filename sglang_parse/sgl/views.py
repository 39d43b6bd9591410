"""Some requests of SGLang's batch, as the engine reads a batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor

from sglang_parse.sgl.sampling import expand_rows
from sglang_parse.sgl.scheduler_types import RoundBatch, SchedulerRequest

Value = TypeVar("Value")


@dataclass
class BatchView:
    """Some requests of a batch; its fields are those of `RoundBatch`."""

    reqs: Sequence[SchedulerRequest]
    req_pool_indices: Tensor
    req_pool_indices_cpu: Tensor
    seq_lens: Tensor
    seq_lens_cpu: Tensor
    sampling_info: Any
    tree_cache: Any
    device: Any
    return_logprob: bool
    top_logprobs_nums: Sequence[int] | None
    token_ids_logprobs: Sequence[list[int] | None] | None
    return_hidden_states: bool


def batch_view(batch: RoundBatch, index: Sequence[int]) -> RoundBatch:
    """The requests at `index` of a batch, in that order; the batch itself for all."""
    if list(index) == list(range(len(batch.reqs))):
        return batch
    rows = list(index)
    wants_logprobs = batch.return_logprob
    return BatchView(
        reqs=[batch.reqs[i] for i in rows],
        req_pool_indices=batch.req_pool_indices[rows],
        req_pool_indices_cpu=batch.req_pool_indices_cpu[rows],
        seq_lens=batch.seq_lens[rows],
        seq_lens_cpu=batch.seq_lens_cpu[rows],
        sampling_info=expand_rows(batch.sampling_info, rows, batch.device),
        tree_cache=batch.tree_cache,
        device=batch.device,
        return_logprob=wants_logprobs,
        top_logprobs_nums=_rows(batch.top_logprobs_nums, rows, wants_logprobs),
        token_ids_logprobs=_rows(batch.token_ids_logprobs, rows, wants_logprobs),
        return_hidden_states=batch.return_hidden_states,
    )


def _rows(
    values: Sequence[Value] | None, rows: Sequence[int], wanted: bool
) -> list[Value] | None:
    return [values[i] for i in rows] if wanted and values is not None else None
