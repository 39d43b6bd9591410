"""Where the shield hooks into SGLang, and which servers have it."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang.srt.plugins.hook_registry import HookType

#: "1" shields every server that sees it, "0" none.
SHIELD_ENV = "SGLANG_REQUEST_SHIELD"
_wanted_by: list[Callable[[Any], bool]] = []


class Seam(NamedTuple):
    """Hooks for one reason: where, what, why, and which change of SGLang makes them
    superfluous."""

    kind: HookType
    target: str
    function: str
    purpose: str
    until: str
    #: Further pairs of target and function, for the same reason.
    others: tuple[tuple[str, str], ...] = ()


_GUARDS = "sglang_parse.shield.guards"
_CALLS = "sglang_parse.shield.operator_calls"
_MANAGER = (
    "sglang.srt.managers.scheduler_components.weight_updater."
    "SchedulerWeightUpdaterManager"
)
_MIXIN = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_UPDATER = (
    "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater"
)
_OPERATOR_CALLS = (
    (f"{_MANAGER}.release_memory_occupation", f"{_CALLS}:guard_memory"),
    (f"{_MANAGER}.resume_memory_occupation", f"{_CALLS}:guard_memory"),
    (f"{_MIXIN}.release_memory_occupation", f"{_CALLS}:ask_for_memory"),
    (f"{_MIXIN}.resume_memory_occupation", f"{_CALLS}:ask_for_memory"),
    (f"{_UPDATER}.update_weights_from_tensor", f"{_CALLS}:check_tensors"),
    (f"{_UPDATER}.load_weights_from_distributed", f"{_CALLS}:check_tensors"),
    (f"{_MANAGER}.update_weights_from_tensor", f"{_CALLS}:survive_tensors"),
)
SEAMS = (
    Seam(
        HookType.AROUND,
        "sglang.srt.managers.tokenizer_manager.TokenizerManager."
        "_create_tokenized_object",
        f"{_GUARDS}:check_ready",
        "no request ends the scheduler",
        "SGLang checks what it sends to the scheduler",
        _OPERATOR_CALLS,
    ),
    Seam(
        HookType.AFTER,
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        f"{_GUARDS}:guard_outputs",
        "malformed requests are answered with HTTP 400",
        "SGLang raises ValueError for them",
    ),
    Seam(
        HookType.BEFORE,
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        f"{_GUARDS}:add_shield",
        "no response breaks off, and none is HTTP 500 where the request is at fault",
        "SGLang's handlers answer whatever they raise",
    ),
    Seam(
        HookType.BEFORE,
        "sglang.srt.managers.schedule_batch.Req._check_str_based_finish",
        "sglang_parse.shield.bounded_stops:bound_search",
        "no stop expression freezes the scheduler",
        "SGLang searches for them in bounded time",
    ),
)


def shield_servers(wants: Callable[[Any], bool]) -> None:
    """Shield the servers whose arguments `wants` accepts, unless SHIELD_ENV decides."""
    _wanted_by.append(wants)


def is_shielded(server_args: Any) -> bool:
    """Whether the server with these arguments has the shield."""
    switch = os.environ.get(SHIELD_ENV)
    if switch is None:
        return any(wants(server_args) for wants in _wanted_by)
    return switch == "1"
