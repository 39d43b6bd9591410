"""What an operator asks of the scheduler, and SGLang 0.5.23 does not survive.

A release of memory is an assertion where requests run, and tensors that cannot be
loaded raise through the scheduler. Here both are answered with HTTP 400.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_parse.shield.faults import shown
from sglang_parse.shield.seams import is_shielded
from sglang_parse.shield.weight_files import problem_of_tensors

logger = logging.getLogger(__name__)


def in_shielded_scheduler() -> bool:
    from sglang.srt.runtime_context import get_server_args

    return is_shielded(get_server_args())


# -- Memory ----------


def guard_memory(original: Callable[..., Any], manager: Any, asked: Any) -> Any:
    """AROUND hook on release_memory_occupation and resume_memory_occupation of
    SchedulerWeightUpdaterManager.

    An answer has no field for a refusal. Its `rid`, which SGLang leaves empty, has it.
    """
    if not in_shielded_scheduler() or not (told := problem_of_memory(manager, asked)):
        return original(manager, asked)
    from sglang.srt.managers import io_struct

    is_release = isinstance(asked, io_struct.ReleaseMemoryOccupationReqInput)
    kind = "Release" if is_release else "Resume"
    return getattr(io_struct, f"{kind}MemoryOccupationReqOutput")(rid=told)


def problem_of_memory(manager: Any, asked: Any) -> str:
    """Why memory cannot be released or resumed now, as one sentence, or ""."""
    from sglang.srt.constants import GPU_MEMORY_ALL_TYPES
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

    is_release = isinstance(asked, ReleaseMemoryOccupationReqInput)
    scheduler = manager.scheduler
    is_paused = scheduler is not None and scheduler._engine_paused
    if is_release and not manager.is_fully_idle(ignore_waiting=is_paused):
        return (
            "Memory is released while requests run; expected none: wait for them, or "
            "use /pause_generation with the mode abort or retract."
        )
    if manager.tp_worker.model_runner.device == "cpu":
        return "Memory is released on a GPU alone, and this server runs on a CPU."
    left = set(asked.tags or GPU_MEMORY_ALL_TYPES) - manager.offload_tags
    if left and not is_release:
        names = ", ".join(sorted(manager.offload_tags)) or "none"
        return f"tags are {shown(sorted(left))}; expected released ones, now {names}."
    return ""


async def ask_for_memory(
    original: Callable[..., Any], manager: Any, asked: Any, *rest: Any
) -> None:
    """AROUND hook on the same functions of TokenizerControlMixin. They drop the
    scheduler's answers.

    Raises ValueError where it refuses, which becomes HTTP 400.
    """
    if not is_shielded(manager.server_args):
        await original(manager, asked, *rest)
        return
    from sglang.srt.managers.io_struct import ReleaseMemoryOccupationReqInput

    manager.auto_create_handle_loop()
    is_release = isinstance(asked, ReleaseMemoryOccupationReqInput)
    name = "release" if is_release else "resume"
    send = getattr(manager, f"{name}_memory_occupation_communicator")
    for answer in await send(asked):
        if answer.rid:
            raise ValueError(answer.rid)


# -- Weights in tensors ----------


def check_tensors(
    original: Callable[..., Any],
    updater: Any,
    named_tensors: Any,
    load_format: str | None = None,
) -> tuple[bool, str]:
    """AROUND hook on WeightUpdater.update_weights_from_tensor and
    .load_weights_from_distributed. Nothing has been written where it refuses."""
    if in_shielded_scheduler() and load_format in (None, "flattened_bucket"):
        served = updater.model_config.model_path
        if told := problem_of_tensors(named_tensors, served):
            return False, f"{told[0].upper()}{told[1:]}; nothing has been loaded."
    given = {} if load_format is None else {"load_format": load_format}
    result: tuple[bool, str] = original(updater, named_tensors, **given)
    return result


def survive_tensors(original: Callable[..., Any], manager: Any, asked: Any) -> Any:
    """AROUND hook on SchedulerWeightUpdaterManager.update_weights_from_tensor: what it
    raises is its answer."""
    try:
        return original(manager, asked)
    except Exception as e:
        if not in_shielded_scheduler():
            raise
        import torch
        from sglang.srt.managers.io_struct import UpdateWeightsFromTensorReqOutput

        logger.exception("An update of weights has failed.")
        torch.distributed.barrier(group=manager.tp_cpu_group)  # others wait there
        told = (
            f"The tensors cannot be loaded ({type(e).__name__}: {shown(str(e))}); some "
            "may have been, so expected all of them again."
        )
        return UpdateWeightsFromTensorReqOutput(success=False, message=told)
