"""Forward batches of our own making, outside SGLang's scheduler: ragged extends and
decode steps over slots that the rows of `req_to_token` name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from torch import Tensor

from sglang_parse.sgl.upload import upload


def build_batch(
    runner: Any,
    mode: ForwardMode,
    *,
    input_ids: Tensor,
    rows: Tensor,
    positions: Tensor,
    out_cache_loc: Tensor,
    seq_lens: Tensor,
    seq_lens_cpu: Tensor,
    capture: CaptureHiddenMode,
    spec_algorithm: Any,
    mrope_shift: Tensor | None = None,
) -> ForwardBatch:
    """A batch for `runner`, a ModelRunner. rows: [bs] of req_to_token; seq_lens: [bs]
    lengths after the forward, on the device and on the host. mrope_shift: [tokens] as
    for `set_mrope_positions`."""
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
        spec_algorithm=spec_algorithm,
        capture_hidden_mode=capture,
        return_hidden_states_before_norm=False,
        global_num_token_non_padded_cpu=len(input_ids),
    )
    set_mrope_positions(runner, batch, mrope_shift)
    count_tokens(runner, batch)
    runner.kv_index_translator.bind_own_plan(batch)
    return batch


def mrope_shifts(reqs: Sequence[Any]) -> list[int]:
    """How far images have moved each request's positions: text goes on at its number of
    tokens plus this (forward_batch_info.py, `_compute_mrope_positions_decode`)."""
    shifts = []
    for req in reqs:
        mm_inputs = getattr(req, "multimodal_inputs", None)
        delta = getattr(mm_inputs, "mrope_position_delta", None)
        shifts.append(0 if delta is None else int(delta))
    return shifts


def set_mrope_positions(runner: Any, batch: ForwardBatch, shift: Tensor | None) -> None:
    """Give a model with positions in three parts those of text: all three the same.

    shift: [tokens] int64 what images add to each row's position, None for nothing.
    """
    if runner.model_config.model_is_mrope:
        positions = batch.positions if shift is None else batch.positions + shift
        batch.mrope_positions = positions.to(torch.int64).expand(3, -1)


def count_tokens(runner: Any, batch: ForwardBatch) -> None:
    """Tell layers of experts on several ranks how many rows are tokens, on the device:
    captured graphs read it there (forward_batch_info.py, `_init_num_token_non_padded`).
    """
    if runner.server_args.ep_size > 1:
        num = torch.tensor(len(batch.input_ids), dtype=torch.int32)
        batch.global_num_token_non_padded = upload(num, batch.input_ids.device)


def extend_fields(
    ids: Sequence[int],
    rows: Tensor,
    starts: Sequence[int],
    lens: Sequence[int],
    table: Tensor,
) -> dict[str, Tensor]:
    """Fields of `build_batch` to forward lens[i] tokens of request i from position
    starts[i] on. ids: request by request. table: req_to_token."""
    device = table.device
    spans = zip(starts, lens, strict=True)
    positions = [p for s, n in spans for p in range(s, s + n)]
    owner = torch.repeat_interleave(
        rows, upload(lens, device), output_size=len(positions)
    )
    position = upload(positions, device, torch.int64)
    ends = torch.tensor([s + n for s, n in zip(starts, lens, strict=True)])
    return {
        "input_ids": upload(ids, device, torch.int64),
        "rows": rows,
        "positions": position,
        "out_cache_loc": table[owner, position].to(torch.int64),
        "seq_lens": upload(ends, device),
        "seq_lens_cpu": ends,
    }


def mark_extend(batch: Any, starts: Sequence[int], lens: Sequence[int]) -> None:
    """What an EXTEND batch needs beside the fields of every batch."""
    device = batch.input_ids.device
    lens_t = upload(lens, device, torch.int32)
    batch.extend_num_tokens = len(batch.input_ids)
    batch.extend_seq_lens = lens_t
    batch.extend_prefix_lens = upload(starts, device, torch.int32)
    batch.extend_start_loc = torch.cumsum(lens_t, 0, dtype=torch.int32) - lens_t
    batch.extend_seq_lens_cpu = list(lens)
    batch.extend_prefix_lens_cpu = list(starts)
    batch.extend_logprob_start_lens_cpu = list(lens)
