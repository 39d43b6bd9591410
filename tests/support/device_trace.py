"""Where the host waits for a GPU, counted without one.

Tensors of the device are made up (torch's FakeTensorMode); those of the host are real.
What is read back is all ones. A copy from ordinary memory, a copy back, and a value
that decides a shape or a branch each make the host wait until the device is idle.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


def devices(values: Any) -> set[str]:
    return {v.device.type for v in tree_leaves(values) if isinstance(v, torch.Tensor)}


def ones(shape: tuple[int, ...], dtype: torch.dtype) -> Any:
    if not shape:
        return torch.ones((), dtype=dtype).item() if dtype.is_floating_point else 1
    return [ones(shape[1:], dtype) for _ in range(shape[0])]


class HostWaits(TorchDispatchMode):
    """Counts what makes the host wait, by the name of the operation."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.counts: Counter[str] = Counter()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def tolist(self, tensor: torch.Tensor) -> Any:
        """Stands for FakeTensor.tolist: one copy back however many values."""
        self.counts["tolist"] += 1
        return ones(tuple(tensor.shape), tensor.dtype)

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        name = op.__name__.split(".")[0]
        target = str(kwargs.get("device", ""))
        fakes = [x for x in tree_leaves((args, kwargs)) if isinstance(x, FakeTensor)]
        if not fakes and not target.startswith("cuda"):
            return op(*args, **kwargs)
        before = devices((args, kwargs))
        if name == "_local_scalar_dense":
            self.counts[name] += 1
            return 1
        with self._fake:
            out = op(*args, **kwargs)
        if self._waits(name, before, devices(out), args, kwargs):
            self.counts[name] += 1
        return out

    def _waits(
        self, name: str, before: set, after: set, args: Any, kwargs: Any
    ) -> bool:
        if name in ("_to_copy", "copy_"):
            crosses = before | after == {"cpu", "cuda"}
            told = args[2:3] if name == "copy_" else ()
            return crosses and not any((*told, kwargs.get("non_blocking")))
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        if name in ("index_put", "index_put_"):
            return args[2].device.type == "cpu"
        return name in ("nonzero", "masked_select")
