"""The hooks of the CPU platform, which no other platform registers."""

from __future__ import annotations

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.plugin.gating import AFTER, AROUND, REPLACE, Hook

_SRT = "sglang.srt"
_UNQUANTIZED = f"{_SRT}.layers.quantization.unquant.Unquantized"
#: Modules of Triton's functions -> the function, and torch's in its stead.
_BY_TORCH = {
    f"{_SRT}.mem_cache.allocation": {
        "assign_req_to_token_pool_func": "cpu.ops:assign_req_to_token_pool",
        "get_last_loc": "cpu.ops:last_slots",
    },
    f"{_SRT}.layers.logits_processor": {"fused_softcap": "cpu.ops:softcap"},
    f"{_SRT}.models.minimax_m2": {
        "rms_sumsq_serial": "cpu.ops:squares",
        "rms_apply_serial": "cpu.ops:normalize",
    },
    f"{_SRT}.models.qwen2_moe": {
        "fused_gate_sigmoid_mul_add": "cpu.ops:add_shared_expert",
    },
}


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
            (f"{module}.{name}", ours)
            for module, functions in _BY_TORCH.items()
            for name, ours in functions.items()
        ),
    ),
    on_cpu(
        AROUND,
        "models with attention sinks start",
        (
            f"{_SRT}.arg_groups.model_hook.handle_model_specific_adjustments",
            "cpu.ops:adjust_to_model",
        ),
    ),
    on_cpu(
        AROUND,
        "experts on several ranks are served",
        (
            f"{_SRT}.layers.moe.fused_moe_native.moe_forward_native",
            "cpu.ops:skip_others_experts",
        ),
    ),
    on_cpu(
        AROUND,
        "hierarchical caches are built",
        (
            f"{_SRT}.model_loader.loader._initialize_model",
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
            f"{_SRT}.layers.logits_processor.LogitsProcessor._compute_lm_head",
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
)
