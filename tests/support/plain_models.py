"""Tiny models of families whose layers attend to the whole context, as Llama's do.

They differ in norms, biases, multipliers, rotary positions and experts.
"""

from typing import Any

from tests.support.tiny_models import COMMON, ROPE, TinyModel

# On a CPU SGLang rounds sizes of feed-forward layers up to a multiple of 64. Half of
# these families have no head size of their own: it is the hidden size's share.
WIDE = {**COMMON, "hidden_size": 64, "intermediate_size": 64}
LOCAL_EXPERTS = {**WIDE, "num_local_experts": 4, "num_experts_per_tok": 2}
EXPERTS = {
    **{**WIDE, "num_experts": 4, "num_experts_per_tok": 2},
    "moe_intermediate_size": 64,
}
MULTIPLIERS = {
    **{"embedding_multiplier": 2.0, "residual_multiplier": 0.6},
    **{"attention_multiplier": 0.2, "logits_scaling": 0.5},
}
EXAONE_NAMES = (
    *(("model.embed_tokens", "transformer.wte"), ("model.layers", "transformer.h")),
    *(("model.norm", "transformer.ln_f"), ("self_attn.o_proj", "self_attn.out_proj")),
    *(("self_attn", "attn.attention"), ("input_layernorm", "ln_1")),
    *(("post_attention_layernorm", "ln_2"), ("gate_proj", "c_fc_0")),
    *(("up_proj", "c_fc_1"), ("down_proj", "c_proj")),
)


def called(name: str, **more: Any) -> dict[str, Any]:
    """Fields by which SGLang takes a model for one of another name. Hugging Face's
    library has no class of that name, but one with the same layers."""
    return {"architectures": [name], **more}


PLAIN = {
    "arcee": TinyModel("ArceeConfig", WIDE),
    "ernie4_5": TinyModel("Ernie4_5Config", WIDE, more=called("Ernie4_5_ForCausalLM")),
    "exaone": TinyModel(
        "LlamaConfig",
        WIDE,
        names=EXAONE_NAMES,
        more=called(
            "ExaoneForCausalLM", activation_function="silu", layer_norm_epsilon=1e-6
        ),
    ),
    "gemma": TinyModel("GemmaConfig", {**WIDE, "tie_word_embeddings": True}),
    "glm4": TinyModel("Glm4Config", WIDE),
    "granite": TinyModel("GraniteConfig", {**WIDE, **MULTIPLIERS}),
    "granitemoe": TinyModel("GraniteMoeConfig", {**LOCAL_EXPERTS, **MULTIPLIERS}),
    "hy_v3": TinyModel(
        "HYV3Config",
        EXPERTS,
        more={"qk_norm": True, "route_norm": True, "first_k_dense_replace": 1},
    ),
    "internlm3": TinyModel("LlamaConfig", WIDE, more=called("InternLM3ForCausalLM")),
    "mimo": TinyModel(
        "Qwen2Config",
        {**WIDE, "rope_parameters": ROPE},
        more=called("MiMoForCausalLM"),
    ),
    "minimax_m2": TinyModel(
        "MiniMaxM2Config",
        {**LOCAL_EXPERTS, "rope_parameters": {**ROPE, "partial_rotary_factor": 0.5}},
        more={
            **{"scoring_func": "sigmoid", "use_routing_bias": True, "rotary_dim": 8},
            **{"use_qk_norm": True, "qk_norm_type": "per_layer"},
        },
    ),
    "ministral3": TinyModel(
        "Ministral3Config",
        {
            **WIDE,
            "rope_parameters": {
                **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 32.0},
                **{"mscale": 1.0, "mscale_all_dim": 1.0, "beta_fast": 32.0},
                **{"beta_slow": 1.0, "llama_4_scaling_beta": 0.1},
                "original_max_position_embeddings": 32,
            },
        },
        more={"original_max_position_embeddings": 32},
    ),
    "mistral": TinyModel("MistralConfig", {**WIDE, "sliding_window": None}),
    "mixtral": TinyModel("MixtralConfig", LOCAL_EXPERTS),
    # SGLang's OLMo and OLMoE have as many heads of keys as of queries.
    "olmo": TinyModel("OlmoConfig", {**WIDE, "num_key_value_heads": 4}),
    "olmo2": TinyModel("Olmo2Config", WIDE),
    "olmoe": TinyModel("OlmoeConfig", {**EXPERTS, "num_key_value_heads": 4}),
    "phi3": TinyModel("Phi3Config", WIDE),
    "qwen2_moe": TinyModel(
        "Qwen2MoeConfig", {**EXPERTS, "shared_expert_intermediate_size": 64}
    ),
    "stablelm": TinyModel("StableLmConfig", {**WIDE, "use_qkv_bias": True}),
    "starcoder2": TinyModel("Starcoder2Config", WIDE),
    "xverse": TinyModel("LlamaConfig", WIDE, more=called("XverseForCausalLM")),
}
