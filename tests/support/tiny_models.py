"""Models of a few kilobytes with random weights, of the real architectures.

They have the embedded pair's tokenizer. A draft has its target's weights with noise, so
that it agrees often and not always.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from sglang_parse.embedded import TARGET_PATH

VOCAB = 640
#: Positions that a layer with a sliding window sees.
WINDOW = 16
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "tie_word_embeddings": False,
    "bos_token_id": None,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "dtype": "float32",
}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
DRAFT_NOISE = 0.02


@dataclass(frozen=True)
class TinyModel:
    """How to build one family's model."""

    #: Class of its config, and that of its model where AutoModel knows no other.
    config: str
    fields: dict[str, Any]
    model: str = ""
    #: Builds its processor of images around a tokenizer, where it is multimodal.
    processor: Callable[[Any], Any] | None = None

    def build(self, folder: Path, *, seed: int = 0, noise: float = 0.0) -> Path:
        """Write the model to `folder`."""
        config = getattr(transformers, self.config)(**self.fields)
        torch.manual_seed(0)
        build: Callable[..., Any] = transformers.AutoModelForCausalLM.from_config
        if self.model:
            build = getattr(transformers, self.model)
        model = build(config).float().eval()
        randomize(model, seed)
        if noise:
            add_noise(model, noise)
        model.generation_config.eos_token_id = 2
        model.save_pretrained(folder)
        for name in TOKENIZER_FILES:
            shutil.copy(TARGET_PATH / name, folder / name)
        if self.processor is not None:
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
            self.processor(tokenizer).save_pretrained(folder)
        path = folder / "config.json"
        saved = json.loads(path.read_text())
        saved["architectures"] = [type(model).__name__]
        saved["dtype"] = saved["torch_dtype"] = "float32"
        path.write_text(json.dumps(saved))
        return folder


def randomize(model: torch.nn.Module, seed: int) -> None:
    """Weights large enough for logits that differ clearly."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(model.named_parameters()):
            noise = torch.randn(p.shape, generator=generator)
            if "sinks" in name:
                p.copy_(noise.bfloat16().float())  # SGLang keeps them in bfloat16
            elif "norm" in name and p.dim() == 1:
                p.add_(0.1 * noise)
            elif p.dim() == 1:
                p.copy_(0.1 * noise)
            elif "embed" in name:
                # A tied embedding must not repeat the token that it reads.
                tied = model.config.get_text_config().tie_word_embeddings
                p.copy_(noise * (0.05 if tied else 1.0))
            else:
                # Experts are [experts, in, out] or [experts, out, in]: both are near.
                scale = 3.0 if "lm_head" in name else 1.0
                p.copy_(scale * noise / p.shape[-1] ** 0.5)


def add_noise(model: torch.nn.Module, noise: float) -> None:
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for _, p in sorted(model.named_parameters()):
            if p.dim() > 1:
                p.add_(noise * p.std() * torch.randn(p.shape, generator=generator))


def qwen3_vl_processor(tokenizer: Any) -> Any:
    return transformers.Qwen3VLProcessor(
        image_processor=transformers.Qwen2VLImageProcessor(
            patch_size=4, min_pixels=64, max_pixels=1024
        ),
        tokenizer=tokenizer,
        video_processor=transformers.Qwen3VLVideoProcessor(patch_size=4),
        chat_template=tokenizer.chat_template,
    )


def pixtral_processor(tokenizer: Any) -> Any:
    mark = "<|endoftext|>"
    return transformers.PixtralProcessor(
        image_processor=transformers.PixtralImageProcessor(
            patch_size=4, size={"longest_edge": 32}
        ),
        tokenizer=tokenizer,
        patch_size=4,
        chat_template=tokenizer.chat_template,
        **{"image_token": mark, "image_break_token": mark, "image_end_token": mark},
    )


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# As in DeepSeek's checkpoints; SGLang knows no other latent attention on a CPU.
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0},
    **{"mscale_all_dim": 1.0, "original_max_position_embeddings": 256},
    **{"beta_fast": 32, "beta_slow": 1},
}
MOE = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
FAMILIES = {
    "llama": TinyModel("LlamaConfig", COMMON),
    "qwen3": TinyModel("Qwen3Config", COMMON),
    "qwen3_moe": TinyModel(
        "Qwen3MoeConfig", {**COMMON, **MOE, "num_experts": 4, "decoder_sparse_step": 1}
    ),
    "glm4_moe": TinyModel(
        "Glm4MoeConfig",
        {
            **{**COMMON, **MOE, "n_routed_experts": 4, "n_shared_experts": 1},
            **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
            "use_qk_norm": True,
        },
    ),
    "gemma3": TinyModel(
        "Gemma3TextConfig",
        {
            **{**COMMON, "tie_word_embeddings": True, "sliding_window": WINDOW},
            **{"query_pre_attn_scalar": 16, "num_hidden_layers": 3},
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "gpt_oss": TinyModel(
        "GptOssConfig",
        {
            **{**COMMON, "sliding_window": WINDOW, "num_local_experts": 4},
            **{"num_experts_per_tok": 2, "num_hidden_layers": 4},
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "rope_parameters": ROPE,
            "intermediate_size": 32,
        },
    ),
    "deepseek_v2": TinyModel(
        "DeepseekV2Config",
        {
            **{**COMMON, "num_key_value_heads": 4, "first_k_dense_replace": 2},
            **{"q_lora_rank": None, "kv_lora_rank": 32, "qk_rope_head_dim": 8},
            **{"qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
            **{
                "n_shared_experts": 1,
                "topk_method": "greedy",
                "moe_layer_freq": 1,
                "rope_parameters": YARN,
            },
        },
    ),
    "deepseek_v3": TinyModel(
        "DeepseekV3Config",
        {
            **{**COMMON, "num_key_value_heads": 4, "first_k_dense_replace": 1},
            **{"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8},
            **{"qk_nope_head_dim": 16, "v_head_dim": 16, "n_routed_experts": 4},
            **{"num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
            **{"n_shared_experts": 1, "n_group": 1, "topk_group": 1},
            **{"rope_parameters": YARN, "moe_layer_freq": 1},
            **{"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
        },
    ),
    "qwen3_vl": TinyModel(
        "Qwen3VLConfig",
        {
            "text_config": {
                **COMMON,
                "rope_parameters": {**ROPE, "mrope_section": [4, 2, 2]},
            },
            "vision_config": {
                **{"depth": 2, "hidden_size": 32, "intermediate_size": 64},
                **{"num_heads": 2, "out_hidden_size": 32, "patch_size": 4},
                **{"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]},
            },
            **{"image_token_id": 600, "video_token_id": 601},
            **{"vision_start_token_id": 602, "vision_end_token_id": 603},
            "tie_word_embeddings": False,
        },
        "Qwen3VLForConditionalGeneration",
        qwen3_vl_processor,
    ),
    "mistral3": TinyModel(
        "Mistral3Config",
        {
            "text_config": {"model_type": "mistral", **COMMON, "sliding_window": None},
            "vision_config": {
                **{"model_type": "pixtral", "hidden_size": 32, "num_hidden_layers": 2},
                **{"num_attention_heads": 2, "head_dim": 16, "patch_size": 4},
                **{"intermediate_size": 48, "image_size": 32},
            },
            **{"image_token_index": 600, "tie_word_embeddings": False},
        },
        "Mistral3ForConditionalGeneration",
        pixtral_processor,
    ),
}
