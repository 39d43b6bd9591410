"""Tensor-parallel ranks act on one rank's measurements.

Every rank runs the whole round, and all decide alike because they see the same logits
and slots. Times differ, and a window that followed them would differ too.
"""

from __future__ import annotations

from typing import Any

import torch


class Ranks:
    """The ranks that serve one model together."""

    def __init__(self, group: Any) -> None:
        """group: sglang's GroupCoordinator of the tensor-parallel ranks."""
        self._group = group

    def agree(self, value: int) -> int:
        """The first rank's value. A collective: every rank calls it every time."""
        if self._group.world_size == 1:
            return value
        held = torch.tensor([value])
        torch.distributed.broadcast(
            held, src=self._group.ranks[0], group=self._group.cpu_group
        )
        return int(held)
