"""Every hook PARSE takes on the server, in one place, and the check that they hold.
The one in programs, which are clients, is in frontend/adapter.py.

SGLang logs and swallows a hook that does not apply (plugins/hook_registry.py), so the
worker calls `check_hooks` before it serves anything. File references are to
sglang 0.5.23.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang.srt.plugins.hook_registry import HookRegistry, HookType

from sglang_parse import flags


@dataclass(frozen=True)
class Hook:
    """One seam: where, what, and why PARSE needs it."""

    target: str
    function: Callable[..., Any]
    kind: HookType
    purpose: str


def _add_draft_kv_bytes(result: int, *args: Any, **kwargs: Any) -> int:
    from sglang_parse.memory import add_draft_cell_size

    return add_draft_cell_size(result, *args, **kwargs)


def _select_logits_rows(result: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_parse.verify import select_logits_rows

    return select_logits_rows(result, *args, **kwargs)


def _check_request_options(result: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_parse.request import check_sampling_params

    return check_sampling_params(result, *args, **kwargs)


def _check_generate_body(result: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_parse.request import check_generate_body

    return check_generate_body(result, *args, **kwargs)


def _report_streamer(result: type, *args: Any, **kwargs: Any) -> type:
    from sglang_parse.report import streamer_class

    return streamer_class(result, *args, **kwargs)


def _earliest_stop(*args: Any, **kwargs: Any) -> Any:
    from sglang_parse.stops import earliest_stop

    return earliest_stop(*args, **kwargs)


def _keep_report(*args: Any, **kwargs: Any) -> Any:
    from sglang_parse.report import keep_report

    return keep_report(*args, **kwargs)


def _watch_outputs(result: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_parse.endpoints import watch_outputs

    return watch_outputs(result, *args, **kwargs)


def _add_endpoints(*args: Any, **kwargs: Any) -> None:
    from sglang_parse.endpoints import add_endpoints

    return add_endpoints(*args, **kwargs)


def _correct_accept_rate(result: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_parse.telemetry import correct_accept_rate

    return correct_accept_rate(result, *args, **kwargs)


def _correct_decode_stats(*args: Any, **kwargs: Any) -> None:
    from sglang_parse.telemetry import correct_decode_stats

    return correct_decode_stats(*args, **kwargs)


def _note_waiting(*args: Any, **kwargs: Any) -> None:
    from sglang_parse.turns import note_waiting

    return note_waiting(*args, **kwargs)


def _add_internal_state(result: Any, *args: Any, **kwargs: Any) -> Any:
    from sglang_parse.telemetry import add_internal_state

    return add_internal_state(result, *args, **kwargs)


def _assign_req_to_token_pool(*args: Any, **kwargs: Any) -> None:
    from sglang_parse.cpu_ops import assign_req_to_token_pool

    return assign_req_to_token_pool(*args, **kwargs)


HOOKS = (
    Hook(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        flags.add_cli_args,
        HookType.AFTER,
        "the --speculative-parse-* flags",
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        flags.attach_options,
        HookType.AFTER,
        "the flags' values ride on the ServerArgs record",
    ),
    Hook(
        "sglang.srt.model_executor.pool_configurator."
        "DefaultPoolConfigurator._compute_cell_size",
        _add_draft_kv_bytes,
        HookType.AFTER,
        "the draft's KV pool is part of the memory budget",
    ),
    Hook(
        "sglang.srt.layers.logits_processor.LogitsMetadata.from_forward_batch",
        _select_logits_rows,
        HookType.AFTER,
        "the LM head runs at the verdict rows only",
    ),
    Hook(
        "sglang.srt.sampling.sampling_params.SamplingParams.verify",
        _check_request_options,
        HookType.AFTER,
        "bad parse_* request options are answered with HTTP 400",
    ),
    Hook(
        "sglang.srt.entrypoints.api_contract.generate_contract_error",
        _check_generate_body,
        HookType.AFTER,
        "streamed /generate requests get their HTTP 400 too",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class",
        _report_streamer,
        HookType.AFTER,
        "the report of a request is part of its meta_info",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.Req._check_str_based_finish",
        _earliest_stop,
        HookType.AROUND,
        "of several stops in a round the first one ends the answer",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager._slice_streaming_output_meta_info",
        _keep_report,
        HookType.AROUND,
        "--incremental-streaming-output keeps the report",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        _watch_outputs,
        HookType.AFTER,
        "the OpenAI endpoints can show the report",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager."
        "_calculate_spec_decoding_metrics",
        _correct_accept_rate,
        HookType.AFTER,
        "spec_accept_rate counts the tokens that were drafted",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.metrics_reporter."
        "SchedulerMetricsReporter.report_decode_stats",
        _correct_decode_stats,
        HookType.BEFORE,
        "the logged accept rate counts the tokens that were drafted",
    ),
    Hook(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        _add_endpoints,
        HookType.BEFORE,
        "the OpenAI endpoints understand `prediction`",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.run_batch",
        _note_waiting,
        HookType.BEFORE,
        "rounds are shorter while requests wait",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        _add_internal_state,
        HookType.AFTER,
        "/server_info shows PARSE's settings and counters",
    ),
)

CPU_HOOKS = (
    Hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        _assign_req_to_token_pool,
        HookType.REPLACE,
        "the slot table is written without Triton on CPU",
    ),
)


def active_hooks() -> tuple[Hook, ...]:
    """The hooks this process needs, by platform."""
    from sglang.srt.platforms import current_platform

    from sglang_parse.cpu_platform import ParseCpuPlatform

    on_cpu = isinstance(current_platform, ParseCpuPlatform)
    return HOOKS + CPU_HOOKS if on_cpu else HOOKS


def register_hooks() -> None:
    """Hand all hooks to SGLang's registry; `load_plugins` applies them."""
    for hook in active_hooks():
        HookRegistry.register(hook.target, hook.function, hook.kind)


def missing_hooks() -> list[Hook]:
    """Hooks that SGLang did not apply in this process."""
    return [h for h in active_hooks() if h.target not in HookRegistry._patched]


@functools.cache
def check_hooks() -> None:
    """Raise RuntimeError naming the first missing hook and the SGLang found."""
    import sglang

    for hook in missing_hooks():
        raise RuntimeError(
            f"sglang {sglang.__version__} has no usable {hook.target}, which PARSE "
            f"needs so that {hook.purpose}; install sglang==0.5.23."
        )
