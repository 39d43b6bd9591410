"""Matrix products with large weights on CPU: oneDNN's packed weights.

torch computes `F.linear` in float32 by MKL, which is slow for a few rows: eight rows
of a 135M model took 42 ms, and by packed weights 13. oneDNN multiplies
by weights in a layout of its own. Each large weight is packed at its first use, and
SGLang keeps the plain one for loading (docs/decisions/0014-packed-weights-on-cpu.md).
"""

from __future__ import annotations

import logging
import platform
from collections.abc import Callable
from typing import Any

import psutil
import torch
from torch import Tensor
from torch.utils.weak import WeakTensorKeyDictionary

logger = logging.getLogger(__name__)

# Elements from which a weight is packed. Smaller ones lie in the processor's cache, and
# a call of oneDNN costs more than it saves for few rows.
MIN_ELEMENTS = 1 << 17
# Bytes of memory that packed weights leave free.
RESERVE = 1 << 30
# Row numbers above these are rounded up to multiples: oneDNN compiles a kernel for each
# number that it meets, in about a millisecond.
EXACT_ROWS, FINE_ROWS = 16, 256
FINE_STEP, COARSE_STEP = 8, 32

# Plain weight -> packed weight, None where it stays as it is.
_packed: WeakTensorKeyDictionary = WeakTensorKeyDictionary()


def apply_linear(
    stock: Callable[..., Tensor],
    method: Any,
    layer: Any,
    x: Tensor,
    bias: Tensor | None = None,
) -> Tensor:
    """AROUND hook on `UnquantizedLinearMethod.apply`."""
    packed = packed_weight(layer.weight, x)
    if packed is None:
        return stock(method, layer, x, bias)
    return multiply(x, packed, bias)


def apply_lm_head(
    stock: Callable[..., Tensor],
    processor: Any,
    hidden_states: Tensor,
    lm_head: Any,
    embedding_bias: Tensor | None = None,
    **kwargs: Any,
) -> Tensor:
    """AROUND hook on `LogitsProcessor._compute_lm_head`."""
    packed = None
    if _is_plain(lm_head) and processor.rl_on_policy_target is None:
        packed = packed_weight(lm_head.weight, hidden_states)
    if packed is None:
        return stock(processor, hidden_states, lm_head, embedding_bias, **kwargs)
    return multiply(hidden_states, packed)


def forget_packed(result: None, method: Any, layer: Any) -> None:
    """AFTER hook on `process_weights_after_loading`, which every loader calls, and
    every update of weights: what was packed is old."""
    weight = getattr(layer, "weight", None)
    if weight is not None:
        _packed.pop(weight, None)


def _is_plain(lm_head: Any) -> bool:
    """Whether SGLang itself would multiply by the head's weight and do no more."""
    if hasattr(lm_head, "set_lora") or not hasattr(lm_head, "weight"):
        return False
    method = type(getattr(lm_head, "quant_method", None)).__name__
    return method in ("NoneType", "UnquantizedEmbeddingMethod")


def packed_weight(weight: Tensor, x: Tensor) -> Tensor | None:
    """`weight`, [out, in], as oneDNN wants it; None where torch multiplies `x`."""
    if weight.numel() < MIN_ELEMENTS or x.dtype != torch.float32:
        return None
    if weight not in _packed:
        _packed[weight] = _pack(weight.detach())
    packed: Tensor | None = _packed[weight]
    return packed


def _pack(weight: Tensor) -> Tensor | None:
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        return None
    # The kernels for other processors were never measured here.
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    if not torch.backends.mkldnn.is_available():
        return None
    free = psutil.virtual_memory().available
    if free < weight.nbytes + RESERVE:
        logger.warning(
            "PARSE: a weight of %d MiB stays unpacked, with %d MiB of memory free: "
            "its layer is slower than it could be.",
            weight.nbytes >> 20,
            free >> 20,
        )
        return None
    return torch.ops.mkldnn._reorder_linear_weight(weight, EXACT_ROWS)


def multiply(x: Tensor, packed: Tensor, bias: Tensor | None = None) -> Tensor:
    """`F.linear(x, weight, bias)` of a packed weight; x: [..., in] float32."""
    rows = x.reshape(-1, x.shape[-1])
    num = len(rows)
    if missing := padded_rows(num) - num:
        rows = torch.cat([rows, rows.new_zeros(missing, rows.shape[1])])
    out = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    return out[:num].view(*x.shape[:-1], out.shape[-1])


def padded_rows(num: int) -> int:
    """Rows that `num` rows are computed as."""
    if num <= EXACT_ROWS:
        return num
    step = FINE_STEP if num <= FINE_ROWS else COARSE_STEP
    return -(-num // step) * step
