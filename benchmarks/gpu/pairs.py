"""Model pairs with real shapes and random weights.

Shapes of the published config.json of each model. Every folder gets the tokenizer of
the embedded pair: its ids are a part of each vocabulary, and speed does not depend on
what they mean. Weights are SGLang's `--load-format dummy`.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_parse.embedded import DRAFT_PATH, HEAD_PATH, TARGET_PATH

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")


def qwen3(hidden: int, layers: int, heads: int, mlp: int, tied: bool) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "intermediate_size": mlp,
        "vocab_size": 151936,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-6,
        "hidden_act": "silu",
        "attention_bias": False,
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


def llama3(
    hidden: int, layers: int, heads: int, mlp: int, tied: bool
) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 64 if hidden == 2048 else 128,
        "intermediate_size": mlp,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "torch_dtype": "bfloat16",
    }


def eagle3(target: dict[str, Any]) -> dict[str, Any]:
    """A head as published for these targets: one layer, 32000 tokens to draft from."""
    return target | {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "draft_vocab_size": 32000,
        "tie_word_embeddings": False,
    }


HEADED = ("qwen3-32b", "llama-3.1-8b")
CONFIGS = {
    "qwen3-32b": qwen3(5120, 64, 64, 25600, tied=False),
    "qwen3-1.7b": qwen3(2048, 28, 16, 6144, tied=True),
    "qwen3-0.6b": qwen3(1024, 28, 16, 3072, tied=True),
    "llama-3.1-8b": llama3(4096, 32, 32, 14336, tied=False),
    "llama-3.2-1b": llama3(2048, 16, 32, 8192, tied=True),
}
CONFIGS |= {f"{name}-eagle3": eagle3(CONFIGS[name]) for name in HEADED}


# Of two layers, for the proof of each fast path over other kinds of attention. Widths
# of heads and of latent vectors are real ones: kernels have no others.
TINY = {
    "vocab_size": 640,  # the embedded tokenizer's
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 16,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
TINY_CONFIGS = {
    "tiny-latent": TINY
    | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "num_key_value_heads": 16,
        **{"q_lora_rank": None, "kv_lora_rank": 512, "v_head_dim": 128},
        **{"qk_nope_head_dim": 128, "qk_rope_head_dim": 64},
        **{"first_k_dense_replace": 2, "n_routed_experts": 4, "moe_layer_freq": 1},
        **{"n_shared_experts": 1, "num_experts_per_tok": 2, "topk_method": "greedy"},
        "moe_intermediate_size": 64,
        "rope_theta": 10000.0,
        "rope_scaling": {
            **{"type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 1.0},
            **{"original_max_position_embeddings": 512, "beta_fast": 32},
            "beta_slow": 1,
        },
    },
    "tiny-windows": TINY
    | {
        "architectures": ["Gemma3ForCausalLM"],
        "model_type": "gemma3_text",
        **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128},
        **{"sliding_window": 16, "query_pre_attn_scalar": 128},
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    },
}


@dataclass(frozen=True)
class PairSpec:
    """target, draft: keys of CONFIGS, or None for the embedded models."""

    name: str
    target: str | None
    draft: str | None
    flags: tuple[str, ...] = ()


PAIRS = {
    "qwen3-32b-1.7b": PairSpec("qwen3-32b-1.7b", "qwen3-32b", "qwen3-1.7b"),
    "qwen3-32b-0.6b": PairSpec("qwen3-32b-0.6b", "qwen3-32b", "qwen3-0.6b"),
    "llama-8b-1b": PairSpec("llama-8b-1b", "llama-3.1-8b", "llama-3.2-1b"),
    "embedded": PairSpec("embedded", None, None),
}
TINY_PAIRS = {
    "tiny-latent": PairSpec("tiny-latent", "tiny-latent", None),
    "tiny-windows": PairSpec(
        "tiny-windows", "tiny-windows", None, ("--disable-hybrid-swa-memory",)
    ),
}


def pair_parser(
    description: str, pairs: Iterable[str], *, nargs: str | None = None
) -> argparse.ArgumentParser:
    """The options of all that builds pairs in its own process."""
    p = argparse.ArgumentParser(description=description)
    p.add_argument("--pair", choices=list(pairs), nargs=nargs, required=True)
    p.add_argument("--out", type=Path, required=True)
    p.add_argument("--models", type=Path, default=Path("build/gpu/models"))
    p.add_argument("--backend", default=None)
    p.add_argument("--repeats", type=int, default=9)
    p.add_argument("--budget-s", type=float, default=240.0)
    return p


def model_folder(name: str | None, root: Path, *, of_draft: bool) -> Path:
    """A folder with config and tokenizer of model `name`."""
    if name is None:
        return DRAFT_PATH if of_draft else TARGET_PATH
    folder = root / name
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(
        json.dumps((CONFIGS | TINY_CONFIGS)[name], indent=1)
    )
    for file in TOKENIZER_FILES:
        shutil.copy(TARGET_PATH / file, folder / file)
    return folder


def model_args(spec: PairSpec, root: Path, *, with_draft: bool = True) -> list[str]:
    """Server flags that name the pair's models."""
    target = model_folder(spec.target, root, of_draft=False)
    args = ["--model-path", str(target), *spec.flags]
    if spec.target is not None:
        args += ["--load-format", "dummy", "--dtype", "bfloat16"]
    if with_draft:
        draft = model_folder(spec.draft, root, of_draft=True)
        args += ["--speculative-draft-model-path", str(draft)]
    return args


def head_folder(spec: PairSpec, root: Path) -> Path:
    """Of an EAGLE-3 head of the pair's target."""
    if spec.target is None:
        return HEAD_PATH
    return model_folder(f"{spec.target}-eagle3", root, of_draft=True)


@dataclass(frozen=True)
class Shape:
    """What the floors of one model depend on. Bytes in bfloat16 (float32 on CPU)."""

    linear_params: int
    head_params: int
    kv_bytes_per_token: int
    layers: int
    heads: int
    head_dim: int

    def decode_bytes(self, context: int, bs: int, itemsize: int) -> int:
        """Bytes a decode step must read: all weights once, each request's KV once."""
        weights = (self.linear_params + self.head_params) * itemsize
        return weights + bs * context * self.kv_bytes_per_token

    def pass_flops(self, rows: int, context: int, head_rows: int) -> int:
        """Multiply-adds of a pass, counted twice; attention over the context alone."""
        linear = 2 * rows * self.linear_params
        attention = 4 * rows * context * self.layers * self.heads * self.head_dim
        return linear + attention + 2 * head_rows * self.head_params


def shape_of(config: dict[str, Any], itemsize: int) -> Shape:
    """From a config.json of one of the two families above."""
    hidden, layers = config["hidden_size"], config["num_hidden_layers"]
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    mlp = 3 * hidden * config["intermediate_size"]
    return Shape(
        linear_params=layers * (attention + mlp),
        head_params=hidden * config["vocab_size"],
        kv_bytes_per_token=2 * layers * kv_heads * head_dim * itemsize,
        layers=layers,
        heads=heads,
        head_dim=head_dim,
    )
