"""Some requests of SGLang's batch, as the engine reads a batch."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import TypeVar

from sglang_parse.sgl.sampling import expand_rows
from sglang_parse.sgl.scheduler_types import RoundBatch

Value = TypeVar("Value")


def batch_view(batch: RoundBatch, index: Sequence[int]) -> RoundBatch:
    """The requests at `index` of a batch, in that order; the batch itself for all."""
    if list(index) == list(range(len(batch.reqs))):
        return batch
    rows = list(index)
    view = copy.copy(batch)
    view.reqs = [batch.reqs[i] for i in rows]
    for name in (
        "req_pool_indices",
        "req_pool_indices_cpu",
        "seq_lens",
        "seq_lens_cpu",
    ):
        setattr(view, name, getattr(batch, name)[rows])
    view.sampling_info = expand_rows(batch.sampling_info, rows, batch.device)
    wanted = batch.return_logprob
    view.top_logprobs_nums = _rows(batch.top_logprobs_nums, rows, wanted)
    view.token_ids_logprobs = _rows(batch.token_ids_logprobs, rows, wanted)
    return view


def _rows(
    values: Sequence[Value] | None, rows: Sequence[int], wanted: bool
) -> list[Value] | None:
    return [values[i] for i in rows] if wanted and values is not None else None
