"""How a verify pass is put to the attention backend.

`mask`: one ragged row of queries per request under a dense custom mask, the paper's
way. `virtual`: the draft chain and every judge suffix are causal sequences of their
own that read the request's KV slots; no mask. Both show every query the same columns.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor

from sglang_parse.plan import (
    RowVisibility,
    VerifyPlan,
    VirtualSequences,
    build_custom_mask,
    build_virtual_sequences,
)

# FlashInfer counts mask cells in int32 (flashinfer/prefill.py, `mask_indptr`).
MAX_MASK_CELLS = 2**31 - 1
EAGER_NO_COPY_ENV = "SGLANG_EAGER_INPUT_NO_COPY"


class ParseVerifyInput(SpecInput):
    """Spec input of the verify pass: what attention backends ask for.

    slots: KV slots per request, [kv_len] each, in the plan's column order.
    logits_rows: [n] int64 rows of the pass at which the LM head runs.
    """

    cuda_graph_compatible = False

    def __init__(
        self, plan: VerifyPlan, slots: list[Tensor], logits_rows: Tensor
    ) -> None:
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.plan = plan
        self.slots = slots
        # SGLang's name in DRAFT_EXTEND_V2 passes (logits_processor.py).
        self.logits_rows = self.select_index = logits_rows
        self.draft_token_num = max(plan.qo_lens)
        self.capture_hidden_mode = CaptureHiddenMode.FULL

    def attention_rows(self) -> tuple[RowVisibility, list[int], list[Tensor]]:
        """Rows for the torch backend (attention.py, `plan_tiles`)."""
        raise NotImplementedError

    def batch_fields(self, req_pool_indices: Tensor) -> dict[str, Any]:
        """Fields of the ForwardBatch that say what its sequences are.

        req_pool_indices: [bs] rows of req_to_token, per request.
        """
        raise NotImplementedError

    def generate_attn_arg_prefill(
        self, *, req_pool_indices: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        """FlashInfer's arguments: kv_indices, kv_indptr, qo_indptr int32, custom_mask.

        Source: sglang/srt/layers/attention/flashinfer_backend.py, `call_begin_forward`.
        """
        raise NotImplementedError


class MaskedVerifyInput(ParseVerifyInput):
    """Route `mask`: the sequences are the requests."""

    def attention_rows(self) -> tuple[RowVisibility, list[int], list[Tensor]]:
        return self.plan.visibility, list(self.plan.qo_lens), self.slots

    def batch_fields(self, req_pool_indices: Tensor) -> dict[str, Any]:
        return {
            "forward_mode": ForwardMode.TARGET_VERIFY,
            "batch_size": len(self.plan.seq_lens),
            "req_pool_indices": req_pool_indices,
            **length_fields(self.plan.seq_lens, req_pool_indices.device),
        }

    def generate_attn_arg_prefill(
        self, *, req_pool_indices: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        device = req_pool_indices.device
        return (
            torch.cat(self.slots).to(torch.int32),
            running_offsets(self.plan.kv_lens, device),
            running_offsets(self.plan.qo_lens, device),
            build_custom_mask(self.plan, device),
        )


class VirtualVerifyInput(ParseVerifyInput):
    """Route `virtual`: the sequences are draft chains and judge suffixes.

    as_extend: for Triton, whose verify mode knows one width per batch. Its extend
    kernel takes a sequence's own keys from the pass and those before them from the
    request's row of req_to_token, where the layer has just written the draft's
    (triton_backend.py, `init_forward_metadata`, `forward_extend`).
    """

    def __init__(
        self,
        plan: VerifyPlan,
        slots: list[Tensor],
        logits_rows: Tensor,
        *,
        as_extend: bool = False,
    ) -> None:
        super().__init__(plan, slots, logits_rows)
        self.as_extend = as_extend
        self.sequences = build_virtual_sequences(plan)
        self.draft_token_num = max(self.sequences.qo_lens)

    def attention_rows(self) -> tuple[RowVisibility, list[int], list[Tensor]]:
        sequences = self.sequences
        slots = virtual_slots(sequences, self.plan, self.slots)
        return (
            RowVisibility.causal(sequences.causal_limits()),
            list(sequences.qo_lens),
            list(slots.split(list(sequences.kv_lens))),
        )

    def batch_fields(self, req_pool_indices: Tensor) -> dict[str, Any]:
        sequences = self.sequences
        device = req_pool_indices.device
        fields = {
            "batch_size": len(sequences.request),
            "req_pool_indices": req_pool_indices[
                torch.tensor(sequences.request, device=device)
            ],
        }
        if not self.as_extend:
            return fields | {
                "forward_mode": ForwardMode.TARGET_VERIFY,
                **length_fields(sequences.prefix_lens, device),
            }
        starts = running_offsets(sequences.qo_lens, device)
        return fields | {
            "forward_mode": ForwardMode.DRAFT_EXTEND_V2,
            **length_fields(sequences.kv_lens, device),
            "extend_num_tokens": sum(sequences.qo_lens),
            "extend_seq_lens": starts[1:] - starts[:-1],
            "extend_prefix_lens": torch.tensor(
                sequences.prefix_lens, dtype=torch.int32, device=device
            ),
            "extend_start_loc": starts[:-1],
            "extend_seq_lens_cpu": list(sequences.qo_lens),
            "extend_prefix_lens_cpu": list(sequences.prefix_lens),
        }

    def generate_attn_arg_prefill(
        self, *, req_pool_indices: Tensor, **_: Any
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
        device = req_pool_indices.device
        sequences = self.sequences
        return (
            virtual_slots(sequences, self.plan, self.slots).to(torch.int32),
            running_offsets(sequences.kv_lens, device),
            running_offsets(sequences.qo_lens, device),
            None,
        )


def build_verify_input(
    route: str,
    backend: str,
    plan: VerifyPlan,
    slots: list[Tensor],
    logits_rows: Tensor,
) -> ParseVerifyInput:
    """The pass as `route` puts it to `backend`.

    A mask with more cells than FlashInfer can count goes the virtual way.
    """
    if route == "mask" and plan.num_mask_cells <= MAX_MASK_CELLS:
        return MaskedVerifyInput(plan, slots, logits_rows)
    return VirtualVerifyInput(plan, slots, logits_rows, as_extend=backend == "triton")


def length_fields(seq_lens: Sequence[int], device: Any) -> dict[str, Any]:
    """The three forms in which a ForwardBatch holds its sequences' lengths."""
    on_host = torch.tensor(seq_lens)
    return {
        "seq_lens": on_host.to(device),
        "seq_lens_cpu": on_host,
        "seq_lens_sum": sum(seq_lens),
    }


def running_offsets(lens: Sequence[int], device: Any) -> Tensor:
    """[len(lens) + 1] int32 offsets, first entry 0."""
    offsets = torch.zeros(len(lens) + 1, dtype=torch.int32)
    offsets[1:] = torch.tensor(lens).cumsum(0)
    return offsets.to(device)


def place_slots(
    plan: VerifyPlan, *, rows: Sequence[int], scratch: Tensor, table: Tensor
) -> tuple[list[Tensor], Tensor]:
    """KV slots of every column of a request, and the slots the pass writes.

    Returns ([kv_len] int64 slots per request, [num_verify_tokens] int64).
    """
    slots = []
    at = 0
    for i, row in enumerate(rows):
        num_row_columns = plan.seq_lens[i] + 1 + plan.num_draft_tokens[i]
        num_scratch = plan.kv_lens[i] - num_row_columns
        own = table[row, :num_row_columns].to(torch.int64)
        slots.append(torch.cat([own, scratch[at : at + num_scratch]]))
        at += num_scratch
    written = [k[n:] for k, n in zip(slots, plan.seq_lens, strict=True)]
    return slots, torch.cat(written)


def virtual_slots(
    sequences: VirtualSequences, plan: VerifyPlan, slots: list[Tensor]
) -> Tensor:
    """[sum of kv_lens] int64 KV slots of the virtual sequences, one after another.

    slots: per request, in the plan's column order.
    """
    device = slots[0].device
    kv_lens = torch.tensor(sequences.kv_lens)
    total = sum(sequences.kv_lens)
    first_column = running_offsets(plan.kv_lens, "cpu")
    request = torch.tensor(sequences.request)
    # Per sequence: where its request's columns start, its own first column among
    # them, its prefix, and where it starts in the result.
    table = torch.stack(
        [
            first_column[request].long(),
            torch.tensor(sequences.own_columns),
            torch.tensor(sequences.prefix_lens),
            running_offsets(sequences.kv_lens, "cpu")[:-1].long(),
        ]
    ).to(device)
    of = torch.repeat_interleave(kv_lens.to(device), output_size=total)
    base, own, prefix, start = table[:, of]
    column = torch.arange(total, device=device) - start
    column = torch.where(column < prefix, column, own + column - prefix)
    return torch.cat(slots)[base + column]


@contextmanager
def room_for(backend: Any, *, num_sequences: int, num_requests: int) -> Iterator[None]:
    """Let a pass hold more sequences than requests.

    Backends size their index buffers by requests, and captured decode graphs go on
    reading those, so they are put back (flashinfer_backend.py, `kv_last_page_len`;
    triton_backend.py, `kv_indptr`, `qo_indptr`). SGLang's eager runner copies a batch
    into buffers of that size too unless told not to (eager_runner.py, `load_batch`).
    """
    if num_sequences <= num_requests:
        yield
        return
    updater = getattr(backend, "indices_updater_prefill", None)
    ones, zeros = torch.Tensor.new_ones, torch.Tensor.new_zeros
    wanted = (
        (updater, "kv_last_page_len", num_sequences, ones),
        (backend, "kv_indptr", num_sequences + 1, zeros),
        (backend, "qo_indptr", num_sequences + 1, zeros),
    )
    replaced = []
    previous = os.environ.get(EAGER_NO_COPY_ENV)
    os.environ[EAGER_NO_COPY_ENV] = "1"
    try:
        for owner, name, size, fill in wanted:
            buffer = getattr(owner, name, None)
            # FlashInfer's own indptr buffers are lists, which a verify pass ignores.
            if isinstance(buffer, Tensor) and len(buffer) < size:
                replaced.append((owner, name, buffer))
                setattr(owner, name, fill(buffer, (size,)))
        yield
    finally:
        for owner, name, buffer in replaced:
            setattr(owner, name, buffer)
        if previous is None:
            del os.environ[EAGER_NO_COPY_ENV]
        else:
            os.environ[EAGER_NO_COPY_ENV] = previous
