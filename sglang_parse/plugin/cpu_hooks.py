"""The hooks of the CPU platform, which no other platform registers."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.plugin.gating import AFTER, AROUND, REPLACE, Hook


def on_cpu(kind: HookType, target: str, ours: str, purpose: str) -> Hook:
    """A hook that any server on the platform needs, whether it serves PARSE or not."""
    return Hook(
        kind,
        target,
        f"sglang_parse.{ours}",
        f"{purpose} on CPU",
        "SGLang serves on CPU without Triton and sgl_kernel",
        is_gated=False,
    )


CPU_HOOKS = (
    on_cpu(
        REPLACE,
        "sglang.srt.mem_cache.allocation.assign_req_to_token_pool_func",
        "cpu.ops:assign_req_to_token_pool",
        "the slot table is written without Triton",
    ),
    on_cpu(
        REPLACE,
        "sglang.srt.mem_cache.allocation.get_last_loc",
        "cpu.ops:last_slots",
        "pages are filled up without Triton",
    ),
    on_cpu(
        AROUND,
        "sglang.srt.mem_cache.pool_host.base.HostKVCache._allocate_host_buffer",
        "cpu.ops:open_host_pool",
        "a hierarchical cache is served",
    ),
    on_cpu(
        REPLACE,
        "sglang.srt.layers.logits_processor.fused_softcap",
        "cpu.ops:softcap",
        "logits are bounded without Triton",
    ),
    on_cpu(
        AROUND,
        "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
        "cpu.ops:adjust_to_model",
        "models with attention sinks start",
    ),
    on_cpu(
        AROUND,
        "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
        "cpu.ops:skip_others_experts",
        "experts on several ranks are served",
    ),
    on_cpu(
        AROUND,
        "sglang.srt.model_loader.loader._initialize_model",
        "cpu.ops:build_on_cpu",
        "models with gated delta nets are built",
    ),
    on_cpu(
        AROUND,
        "sglang.srt.layers.quantization.unquant.UnquantizedLinearMethod.apply",
        "cpu.linear:apply_linear",
        "large weights are read once for all rows",
    ),
    on_cpu(
        AROUND,
        "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
        "cpu.linear:apply_lm_head",
        "a large vocabulary is read once for all rows",
    ),
    *(
        on_cpu(
            AFTER,
            f"sglang.srt.layers.quantization.unquant.{method}."
            "process_weights_after_loading",
            "cpu.linear:forget_packed",
            "updated weights are served",
        )
        for method in ("UnquantizedLinearMethod", "UnquantizedEmbeddingMethod")
    ),
    on_cpu(
        AROUND,
        "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
        "recurrent.gated_backend:add_linear_layers",
        "models with gated delta nets are served",
    ),
    *(
        on_cpu(
            REPLACE,
            f"sglang.kernels.ops.{function}",
            f"recurrent.gated_ops:{ours}",
            "models with gated delta nets run without Triton",
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
