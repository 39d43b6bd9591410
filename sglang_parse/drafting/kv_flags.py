"""Which KV slots hold a drafter's KV of the token they stand for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sglang_parse.sgl.upload import upload


class KvFlags:
    """One flag per slot of the shared pool.

    The target's KV in a slot is always right. A drafter's may be missing: a prefix was
    cached before the drafter saw it, a round was plain, or the token is the last of a
    window. A cached prefix that other requests share keeps its flags with its slots.
    """

    def __init__(self, num_slots: int, device: Any) -> None:
        self._valid = torch.zeros(num_slots + 1, dtype=torch.bool, device=device)

    def forget(self, slots: Tensor) -> None:
        """The slots got new tokens that the drafter has not forwarded."""
        self._valid[slots.long()] = False

    def num_leading(self, sequences: Sequence[Tensor]) -> list[int]:
        """How many leading slots of each sequence hold the drafter's KV. The device is
        read once for all of them."""
        if not sequences:
            return []
        valid = [self._valid[slots.long()].int() for slots in sequences]
        leading: list[int] = torch.stack([v.cumprod(0).sum() for v in valid]).tolist()
        return leading

    def gaps(self, slots: Tensor) -> list[tuple[int, int]]:
        """Runs [start, end) of a sequence's slots that hold none of its KV."""
        missing = ~self._valid[slots.long()]
        edges = torch.nn.functional.pad(missing.int(), (1, 1)).diff()
        starts, ends = (edges == 1).nonzero(), (edges == -1).nonzero()
        return list(zip(starts[:, 0].tolist(), ends[:, 0].tolist(), strict=True))

    def mark(self, table: Tensor, spans: Sequence[tuple[int, int, int, int]]) -> None:
        """Set the flags of columns of some rows, all in one write to the device.

        table: req_to_token. spans: (row, start, valid_end, end). Columns [start,
        valid_end) of the row hold the drafter's KV, [valid_end, end) do not.
        """
        spans = [span for span in spans if span[1] < span[3]]
        if not spans:
            return
        place = upload(spans, table.device)
        row, start, valid_end, end = place.unsqueeze(-1).unbind(1)
        most = max(end - start for _, start, _, end in spans)
        # Behind the end of a shorter span its last column is set again, to the same.
        column = start + torch.arange(most, device=table.device)
        column = torch.minimum(column, end - 1)
        self._valid[table[row, column].long()] = column < valid_end
