"""A GGUF file of the Llama architecture -> a folder that SGLang and transformers read.

Weights are dequantised to float16, which holds the file's 4-bit grid; the CPU platform
computes in float32, a GPU in bfloat16.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGUFReader, dequantize
from numpy.typing import NDArray
from safetensors.numpy import save_file

from benchmarks.real_model.tokenizer import save_tokenizer

BLOCK = 32  # weights that share a scale
NAMES = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
Array = NDArray[np.float32]


def write_model(
    out: Path, *, source: Path, bits: int | None, advance: Callable[[int, int], None]
) -> None:
    """The model of the GGUF file `source` as config, tokenizer and weights in `out`.

    bits: of a coarser copy, see `coarser`; None keeps the file's weights. advance: told
    tensors done and in all.
    """
    reader = GGUFReader(source)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    weights: dict[str, NDArray[np.float16]] = {}
    for done, tensor in enumerate(reader.tensors, 1):
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        weight = in_halves(tensor.name, weight, fields)
        if bits is not None and weight.ndim == 2:
            weight = coarser(weight, bits)
        weights[hf_name(tensor.name)] = weight.astype(np.float16)
        advance(done, len(reader.tensors))
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    (out / "model.safetensors").chmod(0o644)
    save_tokenizer(fields, out)
    write_json(out / "config.json", hf_config(fields))
    write_json(out / "generation_config.json", generation_config(fields))


def hf_name(name: str) -> str:
    """`blk.3.attn_q.weight` -> `model.layers.3.self_attn.q_proj.weight`."""
    parts = name.split(".")
    if parts[0] != "blk":
        return f"{NAMES[parts[0]]}.{parts[1]}"
    return f"model.layers.{parts[1]}.{NAMES[parts[2]]}.{parts[3]}"


def in_halves(name: str, weight: Array, fields: Mapping[str, Any]) -> Array:
    """Rows of q and k as transformers orders them for rotary positions.

    GGUF interleaves the two halves of each head.
    """
    heads = {"attn_q": "head_count", "attn_k": "head_count_kv"}
    kind = name.split(".")[-2]
    if kind not in heads:
        return weight
    count = fields[f"llama.attention.{heads[kind]}"]
    halves = weight.reshape(count, -1, 2, weight.shape[1])
    return halves.swapaxes(1, 2).reshape(weight.shape)


def coarser(weight: Array, bits: int) -> Array:
    """Each BLOCK weights of a row rounded to 2^bits - 1 even steps around zero."""
    blocks = weight.reshape(-1, BLOCK)
    steps = 2 ** (bits - 1) - 1
    scale = np.abs(blocks).max(axis=1, keepdims=True) / steps
    scale[scale == 0] = 1
    rounded: Array = (np.round(blocks / scale) * scale).reshape(weight.shape)
    return rounded


def hf_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of transformers' LlamaForCausalLM."""
    own = {k.removeprefix("llama."): v for k, v in fields.items()}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": own["vocab_size"],
        "hidden_size": own["embedding_length"],
        "intermediate_size": own["feed_forward_length"],
        "num_hidden_layers": own["block_count"],
        "num_attention_heads": own["attention.head_count"],
        "num_key_value_heads": own["attention.head_count_kv"],
        "head_dim": own["rope.dimension_count"],
        "hidden_act": "silu",
        "max_position_embeddings": own["context_length"],
        "rope_theta": own["rope.freq_base"],
        "rms_norm_eps": round(own["attention.layer_norm_rms_epsilon"], 9),
        "tie_word_embeddings": True,
        "attention_bias": False,
        "mlp_bias": False,
        **token_ids(fields),
        "torch_dtype": "bfloat16",
    }


def token_ids(fields: Mapping[str, Any]) -> dict[str, int]:
    """The ids of the tokens that begin, end and fill a text."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding"}
    return {
        f"{ours}_token_id": fields[f"tokenizer.ggml.{theirs}_token_id"]
        for ours, theirs in names.items()
    }


def generation_config(fields: Mapping[str, Any]) -> dict[str, Any]:
    return {**token_ids(fields), "do_sample": False}


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
