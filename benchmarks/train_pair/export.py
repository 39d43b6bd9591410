"""Stacked weights <-> Hugging Face Llama directories."""

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedTokenizerFast

from benchmarks.train_pair.head import Eagle3Head, feature_layers
from benchmarks.train_pair.model import (
    EPS,
    HEAD_DIM,
    THETA,
    ModelConfig,
    TinyLlama,
)

PER_LAYER = {
    "input_layernorm": ("norm1", 1),
    "post_attention_layernorm": ("norm2", 1),
    "self_attn.o_proj": ("wo", 1),
    "mlp.down_proj": ("wd", 1),
}
FUSED = {
    "wqkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "wgu": ("mlp.gate_proj", "mlp.up_proj"),
}
HEAD = {
    "fc": "fc",
    "midlayer.hidden_norm": "hidden_norm",
    "norm": "norm",
    "lm_head": "head",
}


def hf_config(cfg: ModelConfig, tokenizer: PreTrainedTokenizerFast) -> dict:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": cfg.vocab,
        "hidden_size": cfg.hidden,
        "intermediate_size": cfg.ffn,
        "num_hidden_layers": cfg.layers,
        "num_attention_heads": cfg.heads,
        "num_key_value_heads": cfg.heads,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": 2048,
        "rope_theta": THETA,
        "rms_norm_eps": EPS,
        "tie_word_embeddings": False,
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": None,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "torch_dtype": "float32",
    }


def state_dict(model: TinyLlama) -> dict[str, Tensor]:
    out = {
        "model.embed_tokens.weight": model.embed,
        "model.norm.weight": model.norm,
        "lm_head.weight": model.head,
    }
    for layer in range(model.cfg.layers):
        out |= _layer(model, layer, f"model.layers.{layer}.")
    return {k: v.detach().float().clone().contiguous() for k, v in out.items()}


def _layer(model: TinyLlama | Eagle3Head, layer: int, prefix: str) -> dict[str, Tensor]:
    out = {}
    for name, (ours, _) in PER_LAYER.items():
        out[f"{prefix}{name}.weight"] = getattr(model, ours)[layer]
    for ours, names in FUSED.items():
        parts = getattr(model, ours)[layer].chunk(len(names), 0)
        for name, part in zip(names, parts, strict=True):
            out[f"{prefix}{name}.weight"] = part
    return out


def head_state_dict(head: Eagle3Head) -> dict[str, Tensor]:
    """Names as in EAGLE-3 checkpoints; the embedding is the target's and left out."""
    out = {f"{name}.weight": getattr(head, ours) for name, ours in HEAD.items()}
    out |= _layer(head, 0, "midlayer.")
    return {k: v.detach().float().clone().contiguous() for k, v in out.items()}


def export(model: TinyLlama, tokenizer: PreTrainedTokenizerFast, path: Path) -> None:
    """Write config, weights, tokenizer and generation config."""
    path.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(path)
    settings = json.loads((path / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "PreTrainedTokenizerFast"}  # known to 4.x and 5.x
    settings.pop("backend", None)
    text = json.dumps(settings, indent=2) + "\n"
    (path / "tokenizer_config.json").write_text(text)
    config = hf_config(model.cfg, tokenizer)
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    generation = {
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": tokenizer.pad_token_id,
        "do_sample": False,
    }
    text = json.dumps(generation, indent=2) + "\n"
    (path / "generation_config.json").write_text(text)
    _save(state_dict(model), path)


def export_head(
    head: Eagle3Head, tokenizer: PreTrainedTokenizerFast, path: Path, layers: int
) -> None:
    """Write config and weights, as SGLang's EAGLE3 loads them. layers: of the model."""
    path.mkdir(parents=True, exist_ok=True)
    config = hf_config(head.cfg, tokenizer)
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": head.cfg.vocab,
    }
    if layers <= 5:  # SGLang names a layer's input by the layer before it
        before = [layer - 1 for layer in feature_layers(layers)]
        config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": before}
    (path / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    _save(head_state_dict(head), path)


def _save(weights: dict[str, Tensor], path: Path) -> None:
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    (path / "model.safetensors").chmod(0o644)


def load(path: Path) -> TinyLlama:
    """The stacked model of an exported directory."""
    raw = json.loads((path / "config.json").read_text())
    cfg = ModelConfig(
        raw["vocab_size"], raw["num_hidden_layers"], raw["hidden_size"],
        raw["num_attention_heads"], raw["intermediate_size"],
    )  # fmt: skip
    model, weights = TinyLlama(cfg), load_file(path / "model.safetensors")
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(_stacked(name, weights, cfg.layers))
    return model


def fill_head(head: Eagle3Head, weights: dict[str, Tensor]) -> None:
    """Give a head the weights of an exported directory."""
    names = {ours: name for name, ours in HEAD.items()}
    with torch.no_grad():
        for name, param in head.named_parameters():
            if name in names:
                param.copy_(weights[f"{names[name]}.weight"])
            elif param.requires_grad:
                param.copy_(_layers(name, weights, ["midlayer."]))


def _stacked(name: str, weights: dict[str, Tensor], layers: int) -> Tensor:
    single = {"embed": "model.embed_tokens", "norm": "model.norm", "head": "lm_head"}
    if name in single:
        return weights[f"{single[name]}.weight"]
    return _layers(name, weights, [f"model.layers.{i}." for i in range(layers)])


def _layers(name: str, weights: dict[str, Tensor], prefixes: list[str]) -> Tensor:
    names = FUSED.get(name) or [k for k, v in PER_LAYER.items() if v[0] == name]
    return torch.stack(
        [torch.cat([weights[f"{p}{n}.weight"] for n in names]) for p in prefixes]
    )
