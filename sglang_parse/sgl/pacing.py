"""How far the host runs ahead of the device where steps are captured."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import torch

from sglang_parse.sgl.compat.backend_changes import plan_buffers_in_turn


class StepPacer:
    """Keeps the host one captured step ahead of the device, not more.

    One step ahead keeps the device busy. FlashInfer stages the plan of a captured step
    in a page-locked buffer, and the device copies it when its turn comes. With one
    buffer, a step could attend by the plan of a later one. So there are two, in turn: a
    step is planned in the one whose step is known to be done. Nothing to pace on CPU.
    """

    def __init__(self, runner: Any) -> None:
        """runner: the ModelRunner that steps, its graphs captured."""
        device = torch.device(runner.device)
        self._device = None if device.type == "cpu" else torch.get_device_module(device)
        self._running: deque[Any] = deque()
        self._turn: Callable[[], None] = lambda: None
        if self._device is not None:
            self._turn = plan_buffers_in_turn(runner.attn_backend)

    def wait(self) -> None:
        """Before a step: until the step before the last is done."""
        if self._device is None:
            return
        if len(self._running) > 1:
            self._running.popleft().synchronize()
        self._turn()

    def mark(self) -> None:
        """After a step is launched."""
        if self._device is not None:
            event = self._device.Event()
            event.record()
            self._running.append(event)
