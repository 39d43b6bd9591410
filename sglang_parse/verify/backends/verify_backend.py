"""What a verify pass has to tell an attention backend, and the parts all ways share."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType
from torch import Tensor

from sglang_parse.sgl.compat.backend_changes import IndexBuffer
from sglang_parse.sgl.upload import upload
from sglang_parse.verify.layout import RowVisibility, VerifyPlan

#: FlashInfer's arguments: kv_indices, kv_indptr, qo_indptr int32 and custom_mask.
PrefillArguments = tuple[Tensor, Tensor, Tensor, Tensor | None]


class ParseVerifyInput(SpecInput):
    """Spec input of the verify pass: what attention backends read."""

    cuda_graph_compatible = False
    #: [sequences, columns] int32 slots, where the backend reads a sequence's slots in
    #: a row; None where it reads req_to_token or the arguments below.
    table: Tensor | None = None

    def __init__(
        self, plan: VerifyPlan, slots: list[Tensor], logits_rows: Tensor
    ) -> None:
        """slots: KV slots per request, [kv_len] each, in the plan's column order.
        logits_rows: [n] int64 rows of the pass at which the LM head runs."""
        super().__init__(SpecInputType.NGRAM_VERIFY)
        self.plan = plan
        self.slots = slots
        # SGLang's name in DRAFT_EXTEND_V2 passes (logits_processor.py).
        self.logits_rows = self.select_index = logits_rows
        self.draft_token_num = max(plan.qo_lens)
        self.capture_hidden_mode = CaptureHiddenMode.FULL

    @abstractmethod
    def attention_rows(self) -> tuple[RowVisibility, list[int], list[Tensor]]:
        """Rows for the torch backend (cpu/tiles.py, `plan_tiles`): who sees what,
        queries per sequence, and KV slots per sequence."""

    @abstractmethod
    def batch_fields(self, req_pool_indices: Tensor) -> dict[str, Any]:
        """Fields of the ForwardBatch that say what its sequences are.

        req_pool_indices: [bs] rows of req_to_token, per request.
        """

    @abstractmethod
    def generate_attn_arg_prefill(
        self, *, req_pool_indices: Tensor, **_: Any
    ) -> PrefillArguments:
        """FlashInfer's arguments for the pass.

        Source: sglang/srt/layers/attention/flashinfer_backend.py, `call_begin_forward`.
        """


@dataclass(frozen=True)
class VerifyBackend:
    """An attention backend that can serve a verify pass: one row of the registry."""

    #: The value of --attention-backend.
    name: str
    #: The spec input of each route, the default route first;
    #: docs/decisions/0003-verify-routes.md says why. Without one, a pass is a chain of
    #: tokens in decode rows.
    inputs: Mapping[str, type[ParseVerifyInput]]
    #: Buffers that the backend sizes by requests and reads in a verify pass.
    buffers: tuple[IndexBuffer, ...] = ()
    #: The largest --page-size at which it reads a pass's slots one by one.
    max_page_size: int = 1 << 30


def length_fields(seq_lens: Sequence[int], device: Any) -> dict[str, Any]:
    """The three forms in which a ForwardBatch holds its sequences' lengths."""
    on_host = torch.tensor(seq_lens)
    return {
        "seq_lens": upload(on_host, device),
        "seq_lens_cpu": on_host,
        "seq_lens_sum": sum(seq_lens),
    }


def extend_fields(
    qo_lens: Sequence[int], prefix_lens: Sequence[int], device: Any
) -> dict[str, Any]:
    """What a batch of extends says of its sequences, and a captured prefill graph
    reads of any batch."""
    starts = torch.tensor([0, *qo_lens]).cumsum(0)
    table = torch.stack([torch.tensor(qo_lens), torch.tensor(prefix_lens), starts[:-1]])
    lens, prefixes, first = upload(table.int(), device)
    return {
        "extend_num_tokens": int(starts[-1]),
        "extend_seq_lens": lens,
        "extend_prefix_lens": prefixes,
        "extend_start_loc": first,
        "extend_seq_lens_cpu": list(qo_lens),
        "extend_prefix_lens_cpu": list(prefix_lens),
    }


def running_offsets(lens: Sequence[int], device: Any) -> Tensor:
    """[len(lens) + 1] int32 offsets, first entry 0."""
    offsets = torch.zeros(len(lens) + 1, dtype=torch.int32)
    offsets[1:] = torch.tensor(lens).cumsum(0)
    return upload(offsets, device)


def place_slots(
    plan: VerifyPlan, *, rows: Sequence[int], scratch: Tensor, table: Tensor
) -> tuple[list[Tensor], Tensor]:
    """KV slots of every column of a request, and the slots the pass writes.

    rows: of req_to_token, per request. scratch: [plan.num_suffix_tokens] int64 slots.
    table: req_to_token. Returns ([kv_len] int64 slots per request,
    [num_verify_tokens] int64).
    """
    slots = []
    at = 0
    for i, (row, num_row_columns) in enumerate(
        zip(rows, plan.row_columns, strict=True)
    ):
        num_scratch = plan.kv_lens[i] - num_row_columns
        own = table[row, :num_row_columns].to(torch.int64)
        slots.append(torch.cat([own, scratch[at : at + num_scratch]]))
        at += num_scratch
    written = [k[n:] for k, n in zip(slots, plan.seq_lens, strict=True)]
    return slots, torch.cat(written)
