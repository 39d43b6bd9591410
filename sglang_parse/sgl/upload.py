"""Numbers of the host on the device, without waiting for it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def upload(values: Tensor | Sequence[Any], device: Any, dtype: Any = None) -> Tensor:
    """A host tensor, or a list of numbers, on `device`.

    dtype: of a list's tensor, int64 or float32 where none is given. From page-locked
    memory the device takes its copy when it gets there. From ordinary memory the host
    would wait until the device has nothing else to do.
    """
    held = values if isinstance(values, Tensor) else torch.tensor(values, dtype=dtype)
    if torch.device(device).type == "cpu":
        return held
    return page_locked(held).to(device, non_blocking=True)


def page_locked(held: Tensor) -> Tensor:
    """torch frees such memory once the copies from it have happened."""
    return held.pin_memory()
