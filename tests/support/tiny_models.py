"""Models of a few kilobytes with random weights, of the real architectures.

They have the embedded pair's tokenizer. A draft has its target's weights with noise, so
that it agrees often and not always.
"""

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from sglang_parse.embedded import TARGET_PATH

VOCAB = 640
#: Positions that a layer with a sliding window sees.
WINDOW = 8
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
RESIDUAL = 0.2


# A chat template in the shape of multimodal models': parts of a message, or its text.
IMAGE_TEMPLATE = """{% for message in messages %}\
{{ '<|im_start|>' + message['role'] + '\n' }}\
{% if message['content'] is string %}{{ message['content'] }}{% else %}\
{% for part in message['content'] %}\
{% if part['type'] == 'image' %}{{ 'MARK' }}{% else %}{{ part['text'] }}{% endif %}\
{% endfor %}{% endif %}{{ '<|im_end|>' + '\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

CODE = """from transformers import PretrainedConfig


class {name}(PretrainedConfig):
    model_type = "{model_type}"
"""


@dataclass(frozen=True)
class TinyModel:
    """How to build one family's model."""

    #: Class of its config, and that of its model where AutoModel knows no other.
    config: str
    fields: dict[str, Any]
    model: str = ""
    #: Builds its processor of images around a tokenizer, where it is multimodal.
    processor: Callable[[Any], Any] | None = None
    #: Tokens of images by the tokenizer's names for them, which it does not know yet.
    tokens: dict[str, str] = field(default_factory=dict)
    #: What its chat template writes for an image.
    image: str = ""
    #: Class of the config of its language model alone, where it is multimodal.
    text: str = ""
    #: Beginnings of names of weights as checkpoints have them, and the class has not.
    names: tuple[tuple[str, str], ...] = ()
    #: Ends of names of matrices that checkpoints keep the other way round.
    transposed: tuple[str, ...] = ()
    #: Fields of config.json that SGLang reads and Hugging Face's class has not.
    more: dict[str, Any] = field(default_factory=dict)
    #: Whether a checkpoint brings its class of config as code, as real ones do.
    has_code: bool = False
    #: Share of each layer's output that is added to what it read. With little, a draft
    #: without layers agrees often, and so does a head that passes the embedding on.
    residual: float = 1.0
    #: Whether PARSE serves it as a draft.
    drafts_itself: bool = True
    #: What a server of it is given besides, and its environment.
    flags: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    #: Tokens that are added to each prompt.
    longer: int = 0

    def model_of(self, seed: int = 0) -> Any:
        """Hugging Face's model, with its random weights."""
        config = getattr(transformers, self.config)(**self.fields)
        torch.manual_seed(0)
        build: Callable[..., Any] = transformers.AutoModelForCausalLM.from_config
        if self.model:
            build = getattr(transformers, self.model)
        model = build(config).float().eval()
        randomize(model, seed)
        dampen(model, self.residual)
        return model

    def build(self, folder: Path) -> Path:
        """Write the model to `folder`."""
        return self._save(self.model_of(), folder, self.processor, self.more)

    def build_draft(self, folder: Path) -> Path:
        """Write a model that often writes the same: its language model with noise."""
        model, more = self.model_of(), self.more
        if not self.drafts_itself or (self.processor and not self.text):
            model, more = without_layers(model), {}
        elif self.text:
            fields = dict(self.fields["text_config"])
            if "rope_parameters" in fields:
                fields["rope_parameters"] = ROPE  # of text, whose positions are one
            config = getattr(transformers, self.text)(**fields)
            text = transformers.AutoModelForCausalLM.from_config(config).float().eval()
            text.model.load_state_dict(model.model.language_model.state_dict())
            text.lm_head.load_state_dict(model.lm_head.state_dict())
            model, more = text, {}
        add_noise(model, DRAFT_NOISE)
        return self._save(model, folder, None, more)

    def _save(self, model: Any, folder: Path, processor: Any, more: Any) -> Path:
        model.generation_config.eos_token_id = 2
        model.save_pretrained(folder)
        for name in TOKENIZER_FILES:
            shutil.copy(TARGET_PATH / name, folder / name)
        if processor is not None:
            template = IMAGE_TEMPLATE.replace("MARK", self.image)
            (folder / "chat_template.jinja").write_text(template)
            new = {"extra_special_tokens": self.tokens} if self.tokens else {}
            tokenizer = transformers.AutoTokenizer.from_pretrained(folder, **new)
            processor(tokenizer).save_pretrained(folder)
        is_other = bool(self.names or self.transposed)
        for file in folder.glob("*.safetensors") if is_other else ():
            weights = load_file(file)
            for name in weights:
                if name.endswith(self.transposed):
                    weights[name] = weights[name].transpose(-1, -2).contiguous()
            for old, new in self.names:
                weights = {k.replace(old, new): v for k, v in weights.items()}
            save_file(weights, file, metadata={"format": "pt"})
        path = folder / "config.json"
        saved = json.loads(path.read_text())
        saved["architectures"] = [type(model).__name__]
        saved["dtype"] = saved["torch_dtype"] = "float32"
        saved.update(more)
        if self.has_code:
            del saved["rope_parameters"]
            saved["auto_map"] = {"AutoConfig": f"configuration.{self.config}"}
            code = CODE.format(name=self.config, model_type=saved["model_type"])
            (folder / "configuration.py").write_text(code)
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
            elif "indexer.weights_proj" in name:
                gates = noise / p.shape[-1] ** 0.5
                p.copy_(gates.bfloat16().float())  # SGLang keeps them in bfloat16
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
        for name, b in sorted(model.named_buffers()):
            if "e_score_correction_bias" in name:
                noise = 0.2 * torch.randn(b.shape, generator=generator)
                b.copy_(noise.bfloat16().float())


def dampen(model: torch.nn.Module, share: float) -> None:
    """Scale what each layer adds."""
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.split(".")[-2] in ("o_proj", "down_proj") or (
                name.endswith("experts.down_proj")
            ):
                p.mul_(share)


def without_layers(model: Any) -> Any:
    """A Llama with a model's embedding and head, whose layer adds nothing."""
    body = getattr(model.model, "language_model", model.model)
    fields = {
        **COMMON,
        "hidden_size": body.norm.weight.shape[0],
        "num_hidden_layers": 1,
    }
    config = transformers.LlamaConfig(**fields)
    llama = transformers.AutoModelForCausalLM.from_config(config).float().eval()
    dampen(llama, 0.0)
    llama.model.embed_tokens.load_state_dict(body.embed_tokens.state_dict())
    llama.lm_head.load_state_dict(model.lm_head.state_dict())
    with torch.no_grad():
        llama.model.norm.weight.copy_(body.norm.weight)
    return llama


def add_noise(model: torch.nn.Module, noise: float) -> None:
    """Add to matrices a share of their spread."""
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for _, p in sorted(model.named_parameters()):
            if p.dim() > 1:
                p.add_(noise * p.std() * torch.randn(p.shape, generator=generator))


def pixtral_processor(tokenizer: Any) -> Any:
    return transformers.PixtralProcessor(
        image_processor=transformers.PixtralImageProcessor(
            patch_size=4, size={"longest_edge": 32}
        ),
        tokenizer=tokenizer,
        patch_size=4,
        spatial_merge_size=2,
        chat_template=tokenizer.chat_template,
    )


def qwen_processor(name: str, patch: int = 4) -> Callable[[Any], Any]:
    """Builds a Qwen-VL processor. A token has an image's 2 by 2 patches, and a patch so
    many pixels each way."""

    def build(tokenizer: Any) -> Any:
        video = "Qwen3VL" if name.startswith("Qwen3") else "Qwen2VL"
        sizes = {
            **{"patch_size": patch, "merge_size": 2, "temporal_patch_size": 2},
            "size": {"shortest_edge": 4 * patch**2, "longest_edge": 256 * patch**2},
        }
        return getattr(transformers, name)(
            image_processor=transformers.Qwen2VLImageProcessor(**sizes),
            tokenizer=tokenizer,
            video_processor=getattr(transformers, f"{video}VideoProcessor")(**sizes),
            chat_template=tokenizer.chat_template,
        )

    return build


def gemma_processor(tokenizer: Any) -> Any:
    return transformers.Gemma3Processor(
        image_processor=transformers.Gemma3ImageProcessor(
            size={"height": 16, "width": 16}
        ),
        tokenizer=tokenizer,
        chat_template=tokenizer.chat_template,
        image_seq_length=4,
    )


ROPE = {"rope_type": "default", "rope_theta": 10000.0}
# As in DeepSeek's checkpoints; SGLang knows no other latent attention on a CPU.
YARN = {
    **{"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "mscale": 1.0},
    **{"mscale_all_dim": 1.0, "original_max_position_embeddings": 256},
    **{"beta_fast": 32, "beta_slow": 1},
}
# The tokenizer numbers those of a model from 581 on.
GEMMA_TOKENS = {
    **{"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"},
    "image_token": "<image_soft_token>",
}
MOE = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "norm_topk_prob": True,
}
VISION_START, VISION_END, IMAGE, VIDEO = 581, 582, 583, 584
QWEN_TOKENS = {
    **{"vision_start_token": "<|vision_start|>", "vision_end_token": "<|vision_end|>"},
    **{"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"},
}
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"
PIXTRAL_TOKENS = {
    **{"image_token": "[IMG]", "image_break_token": "[IMG_BREAK]"},
    "image_end_token": "[IMG_END]",
}
QWEN_VL = {
    **{"image_token_id": IMAGE, "video_token_id": VIDEO, "tie_word_embeddings": False},
    **{"vision_start_token_id": VISION_START, "vision_end_token_id": VISION_END},
}
QWEN_VISION = {
    **{"depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64},
    **{"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
    "out_hidden_size": 32,
}
MLA = {
    **{**COMMON, "num_key_value_heads": 4, "head_dim": 8, "kv_lora_rank": 32},
    **{"qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    **{"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24},
    **{"n_shared_experts": 1, "rope_parameters": YARN},
}
FAMILIES = {
    "llama": TinyModel("LlamaConfig", COMMON),
    "qwen2": TinyModel(
        "Qwen2Config",
        {**COMMON, "hidden_size": 64, "rope_parameters": ROPE},
    ),
    "qwen3": TinyModel("Qwen3Config", COMMON),
    "qwen3_moe": TinyModel(
        "Qwen3MoeConfig",
        {**COMMON, **MOE, "num_experts": 4, "decoder_sparse_step": 1},
    ),
    "glm4_moe": TinyModel(
        "Glm4MoeConfig",
        {
            **{**COMMON, **MOE, "n_routed_experts": 4, "n_shared_experts": 1},
            **{"first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
            "use_qk_norm": True,
        },
        residual=RESIDUAL,
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
            "num_experts_per_tok": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "rope_parameters": ROPE,
            "intermediate_size": 32,
        },
    ),
    "deepseek_v2": TinyModel(
        "DeepseekV2Config",
        {
            **{**MLA, "first_k_dense_replace": 2, "q_lora_rank": None},
            **{"topk_method": "greedy", "moe_layer_freq": 1},
        },
    ),
    "deepseek_v3": TinyModel(
        "DeepseekV3Config",
        {
            **{**MLA, "first_k_dense_replace": 1, "q_lora_rank": 24},
            **{"n_routed_experts": 8, "n_group": 4, "topk_group": 2},
            **{"norm_topk_prob": True, "routed_scaling_factor": 2.5},
            "rope_interleave": True,
        },
        more={
            **{"topk_method": "noaux_tc", "scoring_func": "sigmoid"},
            "moe_layer_freq": 1,
        },
        residual=RESIDUAL,
    ),
    "gemma2": TinyModel(
        "Gemma2Config",
        {
            **{**COMMON, "tie_word_embeddings": True, "sliding_window": WINDOW},
            **{"query_pre_attn_scalar": 16, "num_hidden_layers": 3},
            **{"attn_logit_softcapping": 5.0, "final_logit_softcapping": 30.0},
        },
        more={"hidden_act": "gelu_pytorch_tanh"},
    ),
    "gemma3_images": TinyModel(
        "Gemma3Config",
        {
            "text_config": {
                **{**COMMON, "sliding_window": WINDOW, "query_pre_attn_scalar": 16},
                **{"num_hidden_layers": 3, "tie_word_embeddings": True},
                "layer_types": [
                    *("sliding_attention", "full_attention", "sliding_attention")
                ],
            },
            "vision_config": {
                **{"hidden_size": 32, "intermediate_size": 64, "image_size": 16},
                **{"num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4},
                "vision_use_head": False,
            },
            **{"mm_tokens_per_image": 4, "boi_token_index": 581},
            **{"eoi_token_index": 582, "image_token_index": 583},
            "tie_word_embeddings": True,
        },
        "Gemma3ForConditionalGeneration",
        gemma_processor,
        GEMMA_TOKENS,
        "<start_of_image>",
        text="Gemma3TextConfig",
        names=(("vision_tower.", "vision_tower.vision_model."),),
    ),
    "qwen2_5_vl": TinyModel(
        "Qwen2_5_VLConfig",
        {
            **QWEN_VL,
            "text_config": {
                **COMMON,
                "hidden_size": 64,  # Qwen2's heads have the hidden size's share
                "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                **{**QWEN_VISION, "window_size": 56, "fullatt_block_indexes": [1]},
                # SGLang takes patches of another size for embeddings.
                **{"out_hidden_size": 64, "patch_size": 14},
            },
        },
        "Qwen2_5_VLForConditionalGeneration",
        qwen_processor("Qwen2_5_VLProcessor", 14),
        QWEN_TOKENS,
        QWEN_IMAGE,
        residual=RESIDUAL,
    ),
    "qwen3_vl": TinyModel(
        "Qwen3VLConfig",
        {
            **QWEN_VL,
            "text_config": {
                **COMMON,
                "rope_parameters": {
                    **{**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
                },
            },
            "vision_config": {
                **{**QWEN_VISION, "num_position_embeddings": 16},
                "deepstack_visual_indexes": [0],
            },
        },
        "Qwen3VLForConditionalGeneration",
        qwen_processor("Qwen3VLProcessor"),
        QWEN_TOKENS,
        QWEN_IMAGE,
        text="Qwen3Config",
    ),
    "qwen2_vl": TinyModel(
        "Qwen2VLConfig",
        {
            **QWEN_VL,
            "text_config": {
                **COMMON,
                "hidden_size": 64,
                "rope_parameters": {**ROPE, "mrope_section": [2, 3, 3]},
            },
            "vision_config": {
                **{"depth": 2, "embed_dim": 32, "num_heads": 2, "mlp_ratio": 2},
                **{"patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2},
                **{"hidden_size": 64, "in_chans": 3},
            },
        },
        "Qwen2VLForConditionalGeneration",
        qwen_processor("Qwen2VLProcessor"),
        QWEN_TOKENS,
        QWEN_IMAGE,
        residual=RESIDUAL,
    ),
    "qwen3_vl_moe": TinyModel(
        "Qwen3VLMoeConfig",
        {
            **QWEN_VL,
            "text_config": {
                **{**COMMON, **MOE, "num_experts": 4, "decoder_sparse_step": 1},
                "num_hidden_layers": 3,
                "rope_parameters": {
                    **{**ROPE, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
                },
            },
            "vision_config": {
                **{**QWEN_VISION, "num_position_embeddings": 16, "depth": 3},
                "deepstack_visual_indexes": [0, 1, 2],  # SGLang knows no other number
            },
        },
        "Qwen3VLMoeForConditionalGeneration",
        qwen_processor("Qwen3VLProcessor"),
        QWEN_TOKENS,
        QWEN_IMAGE,
        transposed=("experts.gate_up_proj", "experts.down_proj"),
        residual=RESIDUAL,
    ),
    "mimo_v2": TinyModel(
        "MiMoV2FlashConfig",
        {
            **{**COMMON, **MOE, "num_hidden_layers": 3, "v_head_dim": 8},
            **{"n_routed_experts": 4, "sliding_window": WINDOW},
            "layer_types": ["full_attention", "sliding_attention", "full_attention"],
            "mlp_layer_types": ["dense", "sparse", "sparse"],
            "rope_parameters": {
                "full_attention": {**ROPE, "partial_rotary_factor": 0.5},
                "sliding_attention": {
                    **{"rope_type": "default", "rope_theta": 1000.0},
                    "partial_rotary_factor": 0.5,
                },
            },
        },
        more={
            **{"hybrid_layer_pattern": [0, 1, 0], "moe_layer_freq": [0, 1, 1]},
            **{"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4},
            **{"swa_head_dim": 16, "swa_v_head_dim": 8, "rope_theta": 10000.0},
            **{"swa_rope_theta": 1000.0, "partial_rotary_factor": 0.5},
            # SGLang counts the tokens before a row alone.
            **{"sliding_window_size": WINDOW - 1, "layernorm_epsilon": 1e-5},
            **{"scoring_func": "sigmoid", "topk_method": "noaux_tc"},
            "add_swa_attention_sink_bias": True,
        },
        has_code=True,
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
            **{"image_token_index": 581, "tie_word_embeddings": False},
        },
        "Mistral3ForConditionalGeneration",
        pixtral_processor,
        PIXTRAL_TOKENS,
        "[IMG]",
        text="MistralConfig",
    ),
}
