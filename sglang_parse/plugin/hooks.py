"""Every hook that PARSE registers in SGLang, and the check that all of them apply.

Each row states what is hooked, why, and which change of SGLang would make it
superfluous. A hook has no effect in a process that does not serve PARSE. The shield's
rows are in `shield/seams.py`. What PARSE changes while a server runs is in
`sgl/compat`; the hook in SGLang programs, which are clients, is in
`frontend/adapter.py`.

SGLang logs and ignores a hook that does not apply (plugins/hook_registry.py), so the
worker calls `check_hooks` before it serves. File references are to sglang 0.5.23.
"""

from __future__ import annotations

import functools

from sglang_parse.cpu.platform import ParseCpuPlatform
from sglang_parse.plugin.cpu_hooks import CPU_HOOKS
from sglang_parse.plugin.gating import AFTER, AROUND, BEFORE, Hook
from sglang_parse.shield.seams import SEAMS

HOOKS = (
    Hook(
        AFTER,
        "sglang.srt.server_args.ServerArgs.add_cli_args",
        "sglang_parse.plugin.flags:add_cli_args",
        "the --speculative-parse-* flags exist",
        "plugins may add arguments",
        is_gated=False,
    ),
    Hook(
        AFTER,
        "sglang.srt.server_args.ServerArgs.from_cli_args",
        "sglang_parse.plugin.flags:attach_options",
        "the values of the flags travel on the ServerArgs record",
        "plugins may add arguments",
        is_gated=False,
    ),
    Hook(
        None,
        "handle_deprecated_dp_attention",
        "sglang_parse.plugin.start_checks:check_early",
        "a start that cannot work ends before a model is looked at",
        "SGLang asks registered algorithms before it reads models",
    ),
    Hook(
        None,
        "handle_deterministic_inference",
        "sglang_parse.plugin.defaults:default_attention_backend",
        "the default attention backend can serve verify passes",
        "registered algorithms may name a default backend",
    ),
    Hook(
        AFTER,
        "sglang.srt.model_executor.pool_configurator.DefaultPoolConfigurator."
        "_compute_cell_size",
        "sglang_parse.plugin.kv_budget:add_draft_cell_size",
        "the draft's KV pool is part of the memory budget",
        "SGLang budgets the pools of registered algorithms",
    ),
    Hook(
        AFTER,
        "sglang.srt.layers.logits_processor.LogitsMetadata.from_forward_batch",
        "sglang_parse.verify.passes:select_logits_rows",
        "the LM head runs at the verdict rows only",
        "a batch may name its rows for the LM head",
    ),
    Hook(
        AFTER,
        "sglang.srt.managers.scheduler.Scheduler.get_output_streamer_class",
        "sglang_parse.plugin.report_streamer:streamer_class",
        "the report of a request is part of its meta_info",
        "a worker may add to meta_info",
    ),
    Hook(
        AROUND,
        "sglang.srt.managers.tokenizer_manager._slice_streaming_output_meta_info",
        "sglang_parse.plugin.report_streamer:keep_report",
        "--incremental-streaming-output keeps the report",
        "SGLang slices only lists with an entry per token",
    ),
    Hook(
        AROUND,
        "sglang.srt.managers.schedule_batch.Req._check_str_based_finish",
        "sglang_parse.plugin.stops:look_at_last_token",
        "an answer ends at the stop at which single tokens would end it",
        "SGLang looks for stops token by token",
    ),
    Hook(
        AFTER,
        "sglang.srt.managers.tokenizer_manager.TokenizerManager.generate_request",
        "sglang_parse.plugin.request_hooks:follow_request",
        "bad options are answered with HTTP 400, and endpoints can show reports",
        "plugins may validate requests and see their outputs",
    ),
    Hook(
        BEFORE,
        "sglang.srt.managers.scheduler_components.metrics_reporter."
        "SchedulerMetricsReporter.report_decode_stats",
        "sglang_parse.plugin.metrics_hooks:correct_decode_stats",
        "the logged accept rate counts the tokens that were drafted",
        "SGLang divides by spec_num_cap_tokens",
    ),
    Hook(
        BEFORE,
        "sglang.srt.entrypoints.http_server._setup_and_run_http_server",
        "sglang_parse.plugin.openai:prepare_http",
        "the OpenAI endpoints understand `prediction` and show reports",
        "SGLang forwards `prediction`, and meta_info in streams",
    ),
    Hook(
        AROUND,
        "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat."
        "_render_and_encode_chat_template",
        "sglang_parse.plugin.inert_messages:encode_messages",
        "special tokens in the messages of users and tools are plain text",
        "SGLang encodes the content of messages without special tokens",
        others=(
            (
                "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat."
                "_engine_prompt",
                "sglang_parse.plugin.inert_messages:send_ids",
            ),
            (
                "sglang.srt.entrypoints.openai.serving_chat.OpenAIServingChat."
                "_apply_conversation_template",
                "sglang_parse.plugin.inert_messages:encode_conversation",
            ),
            (
                "sglang.srt.entrypoints.ollama.serving.OllamaServing.handle_chat",
                "sglang_parse.plugin.inert_messages:encode_ollama",
            ),
        ),
    ),
    Hook(
        AROUND,
        "sglang.srt.managers.scheduler.Scheduler.run_batch",
        "sglang_parse.plugin.scheduler_hooks:run_round",
        "rounds are shorter while requests wait, and lengths are not read back",
        "workers see the waiting queue and may return lengths",
    ),
    Hook(
        AROUND,
        "sglang.srt.managers.schedule_policy.PrefillAdder.add_one_req",
        "sglang_parse.plugin.scheduler_hooks:admit_texts",
        "clients' texts of one prefill fit into one pass",
        "a request may add to the tokens of its prefill",
    ),
    Hook(
        AFTER,
        "sglang.srt.managers.scheduler_components.weight_updater."
        "SchedulerWeightUpdaterManager._select_runners",
        "sglang_parse.plugin.scheduler_hooks:select_runners",
        "the target's weights are not loaded into the draft model",
        "an algorithm may say that its draft is another model",
    ),
    Hook(
        AFTER,
        "sglang.srt.managers.scheduler.Scheduler.get_internal_state",
        "sglang_parse.plugin.metrics_hooks:add_internal_state",
        "/server_info shows PARSE's settings and counters",
        "workers may add to the internal state",
    ),
    *(Hook(*seam[:5], is_gated=False, others=seam.others) for seam in SEAMS),
)


def active_hooks() -> tuple[Hook, ...]:
    """The hooks that this process needs, by platform."""
    from sglang.srt.platforms import current_platform

    on_cpu = isinstance(current_platform, ParseCpuPlatform)
    return HOOKS + CPU_HOOKS if on_cpu else HOOKS


def register_hooks() -> None:
    """Hand all hooks to SGLang."""
    for hook in active_hooks():
        hook.register()


@functools.cache
def check_hooks() -> None:
    """Raise RuntimeError naming the first hook that SGLang did not apply."""
    import sglang

    for hook in active_hooks():
        if hook.missing:
            raise RuntimeError(
                f"sglang {sglang.__version__} has no usable {hook.missing}, which "
                f"PARSE needs so that {hook.purpose}; install sglang==0.5.23."
            )
