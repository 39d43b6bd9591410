"""Tokens of decode steps on the host."""

from __future__ import annotations

import torch

from sglang_parse.sgl import readback
from sglang_parse.sgl.readback import StepTokens


class Device:
    """What a tensor of a GPU, and the device's events, do in a test."""

    def __init__(self) -> None:
        self.type, self.waited, self.marked = "cuda", [], 0

    def mark(self, device) -> Device:
        self.marked += 1
        step = self.marked
        event = Device()
        event.synchronize = lambda: self.waited.append(step)
        return event


def test_on_cpu_every_step_is_known():
    """Red if the host decides without the last step, which has run."""
    steps = StepTokens("cpu")
    for k in range(3):
        steps.add(torch.tensor([k, 10 + k]))
        assert len(steps) == k + 1
        assert steps.known() == steps.all() == [[j, 10 + j] for j in range(k + 1)]


def test_elsewhere_the_last_step_runs_on(monkeypatch):
    """Red if the host waits for the step that runs before it launches another, reads a
    copy before it is there, or waits twice for one."""
    device = Device()
    monkeypatch.setattr(readback, "mark", device.mark)
    monkeypatch.setattr(readback, "page_locked", lambda held: held)
    steps = StepTokens("cuda:0")
    assert steps.known() == []
    for k in range(3):
        steps.add(torch.tensor([k]))
        assert steps.known() == [[j] for j in range(k)]
        assert device.waited == list(range(1, k + 1))
    assert steps.all() == [[0], [1], [2]] and device.waited == [1, 2, 3]
    assert steps.all() == [[0], [1], [2]] and device.waited == [1, 2, 3]
