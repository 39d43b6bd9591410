"""Weights that cannot be read from disk leave the server as it was.

SGLang 0.5.23 raises in the scheduler for a format that it does not know, and for a
checkpoint of another model: it then reads back the weights of the new path, not of the
old one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_parse.shield.faults import MAX_MESSAGE, shown
from sglang_parse.shield.seams import is_shielded

logger = logging.getLogger(__name__)


def survive_update(original: Callable[..., Any], manager: Any, request: Any) -> Any:
    """AROUND hook on SchedulerWeightUpdaterManager.update_weights_from_disk."""
    from sglang.srt.configs.load_config import LoadFormat
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput
    from sglang.srt.runtime_context import get_server_args

    if not is_shielded(get_server_args()):
        return original(manager, request)

    def refused(told: str) -> Any:
        return UpdateWeightFromDiskReqOutput(
            success=False, message=told[:MAX_MESSAGE], num_paused_requests=0
        )

    formats = [str(one.value) for one in LoadFormat]
    if request.load_format not in formats:
        return refused(
            f"load_format is {shown(request.load_format)}; expected one of "
            f"{', '.join(formats)}."
        )
    updaters = [runner.weight_updater for _, runner in manager._select_runners()]
    paths = [updater.model_config.model_path for updater in updaters]
    try:
        output = original(manager, request)
        told = ""
    except Exception as e:
        logger.warning("weights cannot be read from disk", exc_info=True)
        told = f"{type(e).__name__}: {e}"
    if told or not output.success:
        for updater, path in zip(updaters, paths, strict=True):
            updater.model_config.model_path = path
    if not told:
        return output
    for updater, path in zip(updaters, paths, strict=True):
        updater.update_weights_from_disk(path, "auto")
    return refused(f"model_path {shown(request.model_path)} cannot be read ({told}).")
