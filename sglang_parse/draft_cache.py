"""Which KV slots hold the draft model's KV of the token they stand for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class DraftCache:
    """One flag per slot of the shared pool.

    The target's KV in a slot is always right; the draft's may be missing: a prefix
    cached before the draft saw it, plain rounds, the last draft token of a window. A
    cached prefix that other requests share keeps its flags with its slots.
    """

    def __init__(self, num_slots: int, device: Any) -> None:
        self._valid = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)

    def forget(self, slots: Tensor) -> None:
        """The slots got new tokens that the draft has not forwarded."""
        self._valid[slots.long()] = False

    def num_leading(self, slots: Tensor) -> int:
        """How many leading slots of a sequence hold draft KV."""
        missing = (~self._valid[slots.long()]).nonzero()
        return int(missing[0]) if missing.numel() else slots.numel()

    def gaps(self, slots: Tensor) -> list[tuple[int, int]]:
        """Runs [start, end) of a sequence's slots that hold no draft KV."""
        missing = ~self._valid[slots.long()]
        edges = torch.nn.functional.pad(missing.int(), (1, 1)).diff()
        starts, ends = (edges == 1).nonzero(), (edges == -1).nonzero()
        return list(zip(starts[:, 0].tolist(), ends[:, 0].tolist(), strict=True))

    def mark(self, slots: Tensor, *, num_valid: int) -> None:
        """Committed slots: the first `num_valid` hold draft KV, the rest does not."""
        index = slots.long()
        self._valid[index[:num_valid]] = True
        self._valid[index[num_valid:]] = False
