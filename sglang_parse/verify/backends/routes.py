"""The attention backends that can serve a verify pass, and which way each takes.

To add one: a module beside this one with a VerifyBackend, and a row in BACKENDS.
"""

from __future__ import annotations

from torch import Tensor

from sglang_parse.sgl.names import SPARSE_ATTENTION
from sglang_parse.verify.backends.mask import MAX_MASK_CELLS
from sglang_parse.verify.backends.rows import FA3, TORCH_NATIVE
from sglang_parse.verify.backends.verify_backend import ParseVerifyInput, VerifyBackend
from sglang_parse.verify.backends.virtual import CPU, FLASHINFER, TRITON
from sglang_parse.verify.layout import VerifyPlan

#: It reads index keys in pages of 64 slots, and a suffix may begin inside one.
SPARSE = VerifyBackend(SPARSE_ATTENTION, {})
BACKENDS = {
    row.name: row for row in (CPU, FLASHINFER, TRITON, FA3, TORCH_NATIVE, SPARSE)
}


def backend_of(name: str) -> VerifyBackend:
    """The row of an attention backend. Raises ValueError if there is none."""
    if name not in BACKENDS:
        raise ValueError(
            f"--speculative-algorithm PARSE cannot verify on attention backend "
            f"{name}; expected one of {', '.join(BACKENDS)}."
        )
    return BACKENDS[name]


def build_verify_input(
    route: str,
    backend: str,
    plan: VerifyPlan,
    slots: list[Tensor],
    logits_rows: Tensor,
) -> ParseVerifyInput:
    """The pass as `route` puts it to `backend` (arguments of ParseVerifyInput).

    A mask with more cells than FlashInfer can count goes the virtual way.
    """
    if route == "mask" and plan.num_mask_cells > MAX_MASK_CELLS:
        route = "virtual"
    return backend_of(backend).inputs[route](plan, slots, logits_rows)
