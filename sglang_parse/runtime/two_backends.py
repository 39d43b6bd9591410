"""SGLang's attention backend may be two: one for prefills, one for decode steps."""

from __future__ import annotations

from typing import Any


def part_of_two(backend: Any, name: str) -> Any:
    """Of two backends the one called `name`, else the backend itself.

    name: `prefill_backend` or `decode_backend`, as HybridAttnBackend has them
    (layers/attention/hybrid_attn_backend.py). FlashInfer's own backend has words under
    these names, which choose its kernels.
    """
    part = getattr(backend, name, None)
    return backend if part is None or isinstance(part, str) else part
