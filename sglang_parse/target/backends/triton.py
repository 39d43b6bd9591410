"""Route `virtual` on Triton: the pass is a batch of extends, because Triton's verify
mode knows one width per batch.

The extend kernel takes a sequence's own keys from the pass and those before them from
the request's row of req_to_token, where the layer has just written the draft's
(triton_backend.py, `init_forward_metadata`, `forward_extend`).
"""

from __future__ import annotations

from typing import Any

from sglang.srt.model_executor.forward_batch_info import ForwardMode
from torch import Tensor

from sglang_parse.runtime.compat import IndexBuffer
from sglang_parse.target.backends.base import (
    VerifyBackend,
    length_fields,
)
from sglang_parse.target.backends.virtual import VirtualVerifyInput


class ExtendVerifyInput(VirtualVerifyInput):
    """The same virtual sequences, as a batch of extends."""

    def batch_fields(self, req_pool_indices: Tensor) -> dict[str, Any]:
        sequences, device = self.sequences, req_pool_indices.device
        return {
            "forward_mode": ForwardMode.DRAFT_EXTEND_V2,
            **self.sequence_fields(req_pool_indices),
            **length_fields(sequences.kv_lens, device),
        }


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
