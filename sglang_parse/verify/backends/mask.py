"""Route `mask`: one ragged row of queries per request under a dense custom mask, the
paper's way."""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_parse.verify.backends.verify_backend import (
    ParseVerifyInput,
    PrefillArguments,
    extend_fields,
    length_fields,
    running_offsets,
)
from sglang_parse.verify.layout import RowVisibility, build_custom_mask

# FlashInfer counts mask cells in int32 (flashinfer/prefill.py, `mask_indptr`).
MAX_MASK_CELLS = 2**31 - 1


class MaskedVerifyInput(ParseVerifyInput):
    """The sequences are the requests."""

    def attention_rows(self) -> tuple[RowVisibility, list[int], list[Tensor]]:
        return self.plan.visibility, list(self.plan.qo_lens), self.slots

    def batch_fields(self, req_pool_indices: Tensor) -> dict[str, Any]:
        device = req_pool_indices.device
        return {
            "forward_mode": ForwardMode.TARGET_VERIFY,
            "batch_size": len(self.plan.seq_lens),
            "req_pool_indices": req_pool_indices,
            **extend_fields(self.plan.qo_lens, self.plan.seq_lens, device),
            **length_fields(self.plan.seq_lens, device),
        }

    def generate_attn_arg_prefill(
        self, *, req_pool_indices: Tensor, **_: Any
    ) -> PrefillArguments:
        device = req_pool_indices.device
        return (
            torch.cat(self.slots).to(torch.int32),
            running_offsets(self.plan.kv_lens, device),
            running_offsets(self.plan.qo_lens, device),
            build_custom_mask(self.plan, device),
        )
