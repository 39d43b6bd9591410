"""Every hook PARSE takes on the server, in one place, and the check that they hold.
The one in programs, which are clients, is in frontend/adapter.py. What PARSE changes
while a server runs is in runtime/compat.

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

from sglang_parse.integration.flags import add_cli_args
from sglang_parse.integration.lazy import lazy


@dataclass(frozen=True)
class Hook:
    """One seam: where, what, and why PARSE needs it."""

    #: Dotted name of the function of SGLang.
    target: str
    #: Ours.
    function: Callable[..., Any]
    #: Whether ours runs before, after, around or in place of SGLang's.
    kind: HookType
    #: What works because of it, as the end of "PARSE needs it so that ...".
    purpose: str


HOOKS = (
    Hook(
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        add_cli_args,
        HookType.AFTER,
        "the --speculative-parse-* flags",
    ),
    Hook(
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        lazy("sglang_parse.integration.start_checks:attach_and_check"),
        HookType.AFTER,
        "the flags' values ride on the ServerArgs record, and a start is checked",
    ),
    Hook(
        "sglang.srt.model_executor.pool_configurator."
        "DefaultPoolConfigurator._compute_cell_size",
        lazy("sglang_parse.integration.kv_budget:add_draft_cell_size"),
        HookType.AFTER,
        "the draft's KV pool is part of the memory budget",
    ),
    Hook(
        "sglang.srt.layers.logits_processor.LogitsMetadata.from_forward_batch",
        lazy("sglang_parse.target.passes:select_logits_rows"),
        HookType.AFTER,
        "the LM head runs at the verdict rows only",
    ),
    Hook(
        "sglang.srt.sampling.sampling_params.SamplingParams.verify",
        lazy("sglang_parse.integration.request_hooks:check_sampling_params"),
        HookType.AFTER,
        "bad parse_* request options are answered with HTTP 400",
    ),
    Hook(
        "sglang.srt.entrypoints.api_contract.generate_contract_error",
        lazy("sglang_parse.integration.request_hooks:check_generate_body"),
        HookType.AFTER,
        "streamed /generate requests get their HTTP 400 too",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class",
        lazy("sglang_parse.integration.report_streamer:streamer_class"),
        HookType.AFTER,
        "the report of a request is part of its meta_info",
    ),
    Hook(
        "sglang.srt.managers.schedule_batch.Req._check_str_based_finish",
        lazy("sglang_parse.integration.stops:earliest_stop"),
        HookType.AROUND,
        "a round ends at the stop where single tokens would end",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.batch_result_processor."
        "SchedulerBatchResultProcessor._accept_grammar_tokens",
        lazy("sglang_parse.integration.grammars:blame_grammar"),
        HookType.AFTER,
        "a grammar that no text satisfies gets HTTP 400",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.batch_result_processor."
        "SchedulerBatchResultProcessor._apply_prefill_grammar",
        lazy("sglang_parse.integration.grammars:blame_grammar"),
        HookType.AFTER,
        "a grammar that no text satisfies gets HTTP 400",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager._slice_streaming_output_meta_info",
        lazy("sglang_parse.integration.report_streamer:keep_report"),
        HookType.AROUND,
        "--incremental-streaming-output keeps the report",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        lazy("sglang_parse.integration.openai:watch_outputs"),
        HookType.AFTER,
        "the OpenAI endpoints can show the report, and broken requests get HTTP 400",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager."
        "_calculate_spec_decoding_metrics",
        lazy("sglang_parse.integration.metrics_hooks:correct_accept_rate"),
        HookType.AFTER,
        "spec_accept_rate counts the tokens that were drafted",
    ),
    Hook(
        "sglang.srt.managers.scheduler_components.metrics_reporter."
        "SchedulerMetricsReporter.report_decode_stats",
        lazy("sglang_parse.integration.metrics_hooks:correct_decode_stats"),
        HookType.BEFORE,
        "the logged accept rate counts the tokens that were drafted",
    ),
    Hook(
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        lazy("sglang_parse.integration.openai:add_endpoints"),
        HookType.BEFORE,
        "the OpenAI endpoints understand `prediction`; broken requests get HTTP 400",
    ),
    Hook(
        "sglang.srt.entrypoints.http_server.launch_server",
        lazy("sglang_parse.integration.start_checks:check_port"),
        HookType.BEFORE,
        "a port that is taken is told before models are loaded",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager."
        "_create_tokenized_object",
        lazy("sglang_parse.integration.shield_hooks:check_ready"),
        HookType.AROUND,
        "no request ends the scheduler",
    ),
    Hook(
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.init_model_config",
        lazy("sglang_parse.integration.shield_hooks:tell_what_is_read"),
        HookType.AFTER,
        "a server that refuses images warms up with text, and /model_info says so",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.run_batch",
        lazy("sglang_parse.integration.scheduler_hooks:run_round"),
        HookType.AROUND,
        "rounds are shorter while requests wait, and nothing is read back behind them",
    ),
    Hook(
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        lazy("sglang_parse.integration.scheduler_hooks:admit_texts"),
        HookType.AROUND,
        "clients' texts of one prefill fit into one pass",
    ),
    Hook(
        "sglang.srt.managers.scheduler.validate_spec_sampling_mask_request",
        lazy("sglang_parse.integration.scheduler_hooks:check_sampling_mask"),
        HookType.AROUND,
        "`return_sampling_mask` is served",
    ),
    Hook(
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        lazy("sglang_parse.integration.metrics_hooks:add_internal_state"),
        HookType.AFTER,
        "/server_info shows PARSE's settings and counters",
    ),
)

CPU_HOOKS = (
    Hook(
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        lazy("sglang_parse.cpu.ops:assign_req_to_token_pool"),
        HookType.REPLACE,
        "the slot table is written without Triton on CPU",
    ),
    Hook(
        "sglang.srt.mem_cache.allocation.get_last_loc",
        lazy("sglang_parse.cpu.ops:last_slots"),
        HookType.REPLACE,
        "pages are filled up without Triton on CPU",
    ),
    Hook(
        "sglang.srt.mem_cache.pool_host.base.HostKVCache._allocate_host_buffer",
        lazy("sglang_parse.cpu.ops:open_host_pool"),
        HookType.AROUND,
        "a hierarchical cache is served on CPU",
    ),
    Hook(
        "sglang.srt.layers.logits_processor.fused_softcap",
        lazy("sglang_parse.cpu.ops:softcap"),
        HookType.REPLACE,
        "logits are bounded without Triton on CPU",
    ),
    Hook(
        "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
        lazy("sglang_parse.cpu.ops:adjust_to_model"),
        HookType.AROUND,
        "models with attention sinks start on CPU",
    ),
    Hook(
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        lazy("sglang_parse.cpu.ops:skip_others_experts"),
        HookType.AROUND,
        "experts on several ranks are served on CPU",
    ),
    Hook(
        "sglang.srt.model_loader.loader._initialize_model",
        lazy("sglang_parse.cpu.ops:build_on_cpu"),
        HookType.AROUND,
        "models with gated delta nets are built on CPU",
    ),
    Hook(
        "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
        lazy("sglang_parse.cpu.linear:apply_linear"),
        HookType.AROUND,
        "large weights are read once for all rows on CPU",
    ),
    Hook(
        "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        lazy("sglang_parse.cpu.linear:apply_lm_head"),
        HookType.AROUND,
        "a large vocabulary is read once for all rows on CPU",
    ),
    *(
        Hook(
            f"sglang.srt.layers.quantization.unquant.{method}."
            "process_weights_after_loading",
            lazy("sglang_parse.cpu.linear:forget_packed"),
            HookType.AFTER,
            "updated weights are served on CPU",
        )
        for method in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
    ),
    Hook(
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        lazy("sglang_parse.recurrent.gated_backend:add_linear_layers"),
        HookType.AROUND,
        "models with gated delta nets are served on CPU",
    ),
    *(
        Hook(
            f"sglang.kernels.ops.{function}",
            lazy(f"sglang_parse.recurrent.gated_ops:{ours}"),
            HookType.REPLACE,
            "models with gated delta nets run without Triton on CPU",
        )
        for function, ours in (
            (
                "attention.triton_gdn_fused_proj.fused_qkvzba_split_reshape_cat",
                "split_by_group",
            ),
            (
                "attention.triton_gdn_fused_proj."
                "fused_qkvzba_split_reshape_cat_contiguous",
                "split_by_kind",
            ),
            ("attention.fla.fused_norm_gate.rms_norm_gated", "norm_and_gate"),
            ("attention.fla.layernorm_gated.rms_norm_gated", "norm_or_gate"),
            ("elementwise.elementwise.fused_sigmoid_mul", "multiply_by_sigmoid"),
            ("elementwise.elementwise.fused_gate_sigmoid_mul_add", "add_gated"),
        )
    ),
)


def active_hooks() -> tuple[Hook, ...]:
    """The hooks this process needs, by platform."""
    from sglang.srt.platforms import current_platform

    from sglang_parse.cpu.platform import ParseCpuPlatform

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
