"""Route `virtual` on Triton: the pass is a batch of extends, because Triton's verify
mode knows one width per batch.

The extend kernel takes a sequence's own keys from the pass and those before them from
the request's row of req_to_token, where the layer has just written the draft's
(triton_backend.py, `init_forward_metadata`, `forward_extend`).
"""

from __future__ import annotations

from sglang_parse.sgl.compat.backend_changes import IndexBuffer
from sglang_parse.verify.backends.verify_backend import VerifyBackend
from sglang_parse.verify.backends.virtual import ExtendVerifyInput

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
