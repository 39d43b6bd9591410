"""Tokens of the device on the host, while the device goes on."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from sglang_parse.sgl.upload import page_locked


class StepTokens:
    """What decode steps in a row have sampled.

    A device other than the CPU is at the last step while the host launches the next
    one, so what that step samples is not known yet.
    """

    def __init__(self, device: Any) -> None:
        self._on_host = torch.device(device).type == "cpu"
        self._steps: list[tuple[Tensor, Any]] = []
        self._read: list[list[int]] = []

    def add(self, tokens: Tensor) -> None:
        """tokens: [requests] int64 of one more step, on the device."""
        if self._on_host:
            self._steps.append((tokens, None))
            return
        held = page_locked(torch.empty(tokens.shape, dtype=tokens.dtype))
        held.copy_(tokens, non_blocking=True)
        self._steps.append((held, mark(tokens.device)))

    def __len__(self) -> int:
        return len(self._steps)

    def known(self) -> list[list[int]]:
        """Of the steps that are done before the host launches another: all of them on
        CPU, all but the last elsewhere."""
        return self._up_to(len(self._steps) - (not self._on_host))

    def all(self) -> list[list[int]]:
        """Of every step, one list of tokens each; waits for the last one."""
        return self._up_to(len(self._steps))

    def _up_to(self, num: int) -> list[list[int]]:
        for held, copied in self._steps[len(self._read) : num]:
            if copied is not None:
                copied.synchronize()
            self._read.append(held.tolist())
        return self._read


def wait_for(device: torch.device) -> None:
    """Until the device has done all that the host has launched on it."""
    if device.type != "cpu":
        mark(device).synchronize()


def mark(device: torch.device) -> Any:
    """An event after everything that the host has launched on the device so far."""
    event = torch.get_device_module(device).Event()
    event.record()
    return event
