"""The hooks of the CPU platform, which no other platform registers."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.plugin.gating import AFTER, AROUND, REPLACE, Hook

_UNQUANTIZED = "sglang.srt.layers.quantization.unquant.Unquantized"
_FLA = "sglang.kernels.ops.attention.fla"
_PROJECTIONS = "sglang.kernels.ops.attention.triton_gdn_fused_proj"
_ELEMENTWISE = "sglang.kernels.ops.elementwise.elementwise"


def on_cpu(kind: HookType, purpose: str, *pairs: tuple[str, str]) -> Hook:
    """A hook that any server on the platform needs, whether it serves PARSE or not.

    pairs: SGLang's function, and ours in its stead or beside it.
    """
    (target, ours), *others = ((t, f"sglang_parse.{own}") for t, own in pairs)
    return Hook(
        kind,
        target,
        ours,
        f"{purpose} on CPU",
        "SGLang serves on CPU without Triton and sgl_kernel",
        is_gated=False,
        others=tuple(others),
    )


CPU_HOOKS = (
    on_cpu(
        REPLACE,
        "functions of Triton are torch's",
        *(
            (f"{where}.{name}", ours)
            for where, name, ours in (
                (
                    "sglang.srt.mem_cache.allocation",
                    "assign_req_to_token_pool_func",
                    "cpu.ops:assign_req_to_token_pool",
                ),
                (
                    "sglang.srt.mem_cache.allocation",
                    "get_last_loc",
                    "cpu.ops:last_slots",
                ),
                (
                    "sglang.srt.layers.logits_processor",
                    "fused_softcap",
                    "cpu.ops:softcap",
                ),
                (
                    _PROJECTIONS,
                    "fused_qkvzba_split_reshape_cat",
                    "recurrent.gated_ops:split_by_group",
                ),
                (
                    _PROJECTIONS,
                    "fused_qkvzba_split_reshape_cat_contiguous",
                    "recurrent.gated_ops:split_by_kind",
                ),
                (
                    f"{_FLA}.fused_norm_gate",
                    "rms_norm_gated",
                    "recurrent.gated_ops:norm_and_gate",
                ),
                (
                    f"{_FLA}.layernorm_gated",
                    "rms_norm_gated",
                    "recurrent.gated_ops:norm_or_gate",
                ),
                (
                    _ELEMENTWISE,
                    "fused_sigmoid_mul",
                    "recurrent.gated_ops:multiply_by_sigmoid",
                ),
                (
                    _ELEMENTWISE,
                    "fused_gate_sigmoid_mul_add",
                    "recurrent.gated_ops:add_gated",
                ),
            )
        ),
    ),
    on_cpu(
        AROUND,
        "models with attention sinks start",
        (
            "sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments",
            "cpu.ops:adjust_to_model",
        ),
    ),
    on_cpu(
        AROUND,
        "experts on several ranks are served",
        (
            "sglang.srt.layers.moe.fused_moe_native.moe_forward_native",
            "cpu.ops:skip_others_experts",
        ),
    ),
    on_cpu(
        AROUND,
        "models with gated delta nets, and hierarchical caches, are built",
        (
            "sglang.srt.model_loader.loader._initialize_model",
            "cpu.ops:build_on_cpu",
        ),
    ),
    on_cpu(
        AROUND,
        "large weights are read once for all rows",
        (f"{_UNQUANTIZED}LinearMethod.apply", "cpu.linear:apply_linear"),
    ),
    on_cpu(
        AROUND,
        "a large vocabulary is read once for all rows",
        (
            "sglang.srt.layers.logits_processor.LogitsProcessor._compute_lm_head",
            "cpu.linear:apply_lm_head",
        ),
    ),
    on_cpu(
        AFTER,
        "updated weights are served",
        *(
            (
                f"{_UNQUANTIZED}{layer}Method.process_weights_after_loading",
                "cpu.linear:forget_packed",
            )
            for layer in ("Linear", "Embedding")
        ),
    ),
    on_cpu(
        AROUND,
        "models with gated delta nets are served",
        (
            "sglang.srt.layers.attention.attention_registry.attn_backend_wrapper",
            "recurrent.gated_backend:add_linear_layers",
        ),
    ),
)
