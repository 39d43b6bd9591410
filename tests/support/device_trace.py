"""Where the host waits for a GPU, counted without one.

Tensors of the device are made up (torch's FakeTensorMode); those of the host are real.
What is read back is all ones. A copy from ordinary memory, a copy back, and a value
that decides a shape or a branch each make the host wait until the device is idle.

A device that lags reads an upload only when the host waits for it. The bytes of each
non-blocking upload are therefore compared at the next wait with those at its launch.
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


COPIES = ("_to_copy", "copy_")


def source_of(name: str, args: Any) -> torch.Tensor:
    return args[1] if name == "copy_" else args[0]


class Event:
    """Where the host can wait for the device."""

    def __init__(self, trace: HostWaits, until: int) -> None:
        self._trace, self._until = trace, until

    def synchronize(self) -> None:
        self._trace.device_reads(self._until)


class HostWaits(TorchDispatchMode):
    """Counts what makes the host wait, by the name of the operation."""

    def __init__(self) -> None:
        super().__init__()
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self.counts: Counter[str] = Counter()
        # Uploads that the device has yet to read: what it reads, what it should read.
        self._uploads: list[tuple[torch.Tensor, torch.Tensor]] = []
        self.num_uploads = self._num_read = 0
        self.overwritten: list[str] = []

    def __exit__(self, kind, *more) -> None:
        super().__exit__(kind, *more)
        if kind is None:
            self.device_reads()
            found, self.overwritten = self.overwritten, []
            assert not found, f"host memory was overwritten before it was read: {found}"

    def event(self) -> Event:
        """An event of the device, after what has been launched so far."""
        return Event(self, self.num_uploads)

    def device_reads(self, until: int | None = None) -> None:
        """The host has waited for the first `until` uploads, or for all of them."""
        num = len(self._uploads) if until is None else max(0, until - self._num_read)
        read, self._uploads = self._uploads[:num], self._uploads[num:]
        self._num_read += len(read)
        self.overwritten += [
            f"{source.dtype} {list(source.shape)}"
            for source, launched in read
            if not torch.equal(source, launched)
        ]

    def _wait(self, name: str) -> None:
        self.counts[name] += 1
        self.device_reads()

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    def tolist(self, tensor: torch.Tensor) -> Any:
        """Stands for FakeTensor.tolist: one copy back however many values."""
        self._wait("tolist")
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
            self._wait(name)
            return 1
        with self._fake:
            out = op(*args, **kwargs)
        crosses = name in COPIES and before | devices(out) == {"cpu", "cuda"}
        if self._waits(name, crosses, args, kwargs):
            self._wait(name)
        elif crosses and (source := source_of(name, args)).device.type == "cpu":
            self._uploads.append((source, source.clone()))
            self.num_uploads += 1
        return out

    def _waits(self, name: str, crosses: bool, args: Any, kwargs: Any) -> bool:
        if name in COPIES:
            told = args[2:3] if name == "copy_" else ()
            return crosses and not any((*told, kwargs.get("non_blocking")))
        if name == "repeat_interleave":
            return kwargs.get("output_size") is None
        if name in ("index_put", "index_put_"):
            return args[2].device.type == "cpu"
        return name in ("nonzero", "masked_select")
