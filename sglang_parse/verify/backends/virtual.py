"""Route `virtual`: the draft chain and every judge suffix are causal sequences of their
own that read the request's KV slots, without a mask. FlashInfer's default."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_parse.sgl.compat.backend_changes import IndexBuffer
from sglang_parse.sgl.names import CPU_ATTENTION_BACKEND
from sglang_parse.sgl.upload import upload
from sglang_parse.verify.backends.mask import MaskedVerifyInput
from sglang_parse.verify.backends.verify_backend import (
    ParseVerifyInput,
    PrefillArguments,
    VerifyBackend,
    extend_fields,
    length_fields,
    running_offsets,
)
from sglang_parse.verify.layout import (
    RowVisibility,
    VerifyPlan,
    VirtualSequences,
    build_virtual_sequences,
)


class VirtualVerifyInput(ParseVerifyInput):
    """The sequences are draft chains and judge suffixes, several a request."""

    def __init__(
        self, plan: VerifyPlan, slots: list[Tensor], logits_rows: Tensor
    ) -> None:
        super().__init__(plan, slots, logits_rows)
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
        device = req_pool_indices.device
        return {
            "forward_mode": ForwardMode.TARGET_VERIFY,
            **self.sequence_fields(req_pool_indices),
            **length_fields(self.sequences.prefix_lens, device),
        }

    def sequence_fields(self, req_pool_indices: Tensor) -> dict[str, Any]:
        """How many sequences there are, whose rows they read, and how long they are."""
        sequences, device = self.sequences, req_pool_indices.device
        index = upload(sequences.request, device)
        return {
            "batch_size": len(sequences.request),
            "req_pool_indices": req_pool_indices[index],
            **extend_fields(sequences.qo_lens, sequences.prefix_lens, device),
        }

    def generate_attn_arg_prefill(
        self, *, req_pool_indices: Tensor, **_: Any
    ) -> PrefillArguments:
        device = req_pool_indices.device
        sequences = self.sequences
        return (
            virtual_slots(sequences, self.plan, self.slots).to(torch.int32),
            running_offsets(sequences.kv_lens, device),
            running_offsets(sequences.qo_lens, device),
            None,
        )


class ExtendVerifyInput(VirtualVerifyInput):
    """The same virtual sequences, as a batch of extends."""

    def batch_fields(self, req_pool_indices: Tensor) -> dict[str, Any]:
        sequences, device = self.sequences, req_pool_indices.device
        return {
            "forward_mode": ForwardMode.DRAFT_EXTEND_V2,
            **self.sequence_fields(req_pool_indices),
            **length_fields(sequences.kv_lens, device),
        }


#: Its verify mode knows one width per batch. Its extend kernel takes a sequence's own
#: keys from the pass, and those before them from the request's row of req_to_token,
#: where the layer has just written the draft's (triton_backend.py, `forward_extend`).
TRITON = VerifyBackend(
    "triton",
    {"virtual": ExtendVerifyInput},
    (
        IndexBuffer("", "kv_indptr", num_extra=1),
        IndexBuffer("", "qo_indptr", num_extra=1),
        # None where the target has no sliding windows.
        IndexBuffer("", "window_kv_indptr", num_extra=1),
    ),
)
FLASHINFER = VerifyBackend(
    "flashinfer",
    {"virtual": VirtualVerifyInput, "mask": MaskedVerifyInput},
    # Its own running offsets are lists, which a verify pass ignores.
    (IndexBuffer("indices_updater_prefill", "kv_last_page_len", fill=1),),
)
CPU = VerifyBackend(
    CPU_ATTENTION_BACKEND, {"mask": MaskedVerifyInput, "virtual": VirtualVerifyInput}
)


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
    # them, its prefix, where it starts in the result, and its length.
    numbers = torch.stack(
        [
            first_column[request].long(),
            torch.tensor(sequences.own_columns),
            torch.tensor(sequences.prefix_lens),
            running_offsets(sequences.kv_lens, "cpu")[:-1].long(),
            kv_lens,
        ]
    )
    table = upload(numbers, device)
    of = torch.repeat_interleave(table[4], output_size=total)
    base, own, prefix, start = table[:4, of]
    column = torch.arange(total, device=device) - start
    column = torch.where(column < prefix, column, own + column - prefix)
    return torch.cat(slots)[base + column]
