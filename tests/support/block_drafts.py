"""DFLASH and DSpark drafts of random weights, and what they are in plain PyTorch."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

HEADS, KV_HEADS, HEAD_DIM, LAYERS, BLOCK, EPS = 4, 2, 16, 2, 6, 1e-6
# Of a Markov head.
RANK = 8


def write_block_draft(
    folder: Path,
    target: Path,
    *,
    layers: tuple[int, ...] = (0, 1),
    share: float = 1.0,
    markov: str = "",
    **changed,
) -> Path:
    """For the model in `target`. layers: of it that the draft reads. share: of what its
    layers add to the mask's embedding, which alone decides at 0. markov: the
    kind of its Markov head, which makes it a DSpark draft. changed: of
    `dflash_config`."""
    of_target = json.loads((target / "config.json").read_text())
    hidden, vocab = of_target["hidden_size"], of_target["vocab_size"]
    special = {"mask_token_id": 3, "target_layer_ids": list(layers), **changed}
    config = {
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "hidden_size": hidden,
        "vocab_size": vocab,
        "intermediate_size": 2 * hidden,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "rms_norm_eps": EPS,
        "rope_theta": 10000.0,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "dtype": "float32",
        "block_size": BLOCK,
        "dflash_config": special,
    }
    if markov:
        config |= {"architectures": ["Qwen3DSparkModel"], "markov_head_type": markov}
        config |= {"markov_rank": RANK, "enable_confidence_head": False}
        config |= special
    shapes = {
        "fc.weight": (hidden, len(layers) * hidden),
        "hidden_norm.weight": (hidden,),
        "norm.weight": (hidden,),
    }
    for i in range(LAYERS):
        for name, shape in (
            ("self_attn.q_proj", (HEADS * HEAD_DIM, hidden)),
            ("self_attn.k_proj", (KV_HEADS * HEAD_DIM, hidden)),
            ("self_attn.v_proj", (KV_HEADS * HEAD_DIM, hidden)),
            ("self_attn.o_proj", (hidden, HEADS * HEAD_DIM)),
            ("self_attn.q_norm", (HEAD_DIM,)),
            ("self_attn.k_norm", (HEAD_DIM,)),
            ("mlp.gate_proj", (2 * hidden, hidden)),
            ("mlp.up_proj", (2 * hidden, hidden)),
            ("mlp.down_proj", (hidden, 2 * hidden)),
            ("input_layernorm", (hidden,)),
            ("post_attention_layernorm", (hidden,)),
        ):
            shapes[f"layers.{i}.{name}.weight"] = shape
    if markov:
        shapes["markov_head.markov_w1.weight"] = (vocab, RANK)
        shapes["markov_head.markov_w2.weight"] = (vocab, RANK)
    if markov == "rnn":
        shapes["markov_head.joint_proj.weight"] = (3 * RANK, 2 * RANK + hidden)
        shapes["markov_head.joint_proj.bias"] = (3 * RANK,)
    draw = torch.Generator().manual_seed(11)
    weights = {}
    for name, shape in shapes.items():
        made = torch.randn(shape, generator=draw)
        is_norm = len(shape) == 1
        weights[name] = 1 + 0.1 * made if is_norm else made / shape[1] ** 0.5
        if any(part in name for part in ("o_proj", "down_proj", "markov_w2")):
            weights[name] *= share
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def rotated(states: Tensor, positions: Tensor) -> Tensor:
    """Rotary positions of [tokens, heads, HEAD_DIM], halves together."""
    half = HEAD_DIM // 2
    angles = positions[:, None] / 10000.0 ** (torch.arange(half) / half)
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    a, b = states[..., :half], states[..., half:]
    return torch.cat([a * cos - b * sin, b * cos + a * sin], dim=-1)


def block_states(folder: Path, features: Tensor, block: Tensor) -> Tensor:
    """[block, hidden] final hidden states of one block. features: [context, width] of
    the target at positions 0.. ; block: [block, hidden] embeddings behind them."""
    w = load_file(folder / "model.safetensors")
    norm = lambda x, name: rms_norm(x, x.shape[-1:], w[f"{name}.weight"], EPS)  # noqa: E731
    context = norm(linear(features, w["fc.weight"]), "hidden_norm")
    num = len(context)
    at = torch.arange(num + len(block))
    x = block
    for i in range(LAYERS):
        name = f"layers.{i}"
        attention = f"{name}.self_attn"
        read = norm(x, f"{name}.input_layernorm")
        both = torch.cat([context, read])

        def heads(of: Tensor, what: str, a: str = attention) -> Tensor:
            return linear(of, w[f"{a}.{what}_proj.weight"]).view(len(of), -1, HEAD_DIM)

        q = rotated(norm(heads(read, "q"), f"{attention}.q_norm"), at[num:])
        k = rotated(norm(heads(both, "k"), f"{attention}.k_norm"), at)
        v = heads(both, "v")
        k, v = (t.repeat_interleave(HEADS // KV_HEADS, dim=1) for t in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q, k) / HEAD_DIM**0.5
        out = torch.einsum("hqk,khd->qhd", scores.softmax(-1), v).flatten(1)
        x = x + linear(out, w[f"{attention}.o_proj.weight"])
        read = norm(x, f"{name}.post_attention_layernorm")
        gate = silu(linear(read, w[f"{name}.mlp.gate_proj.weight"]))
        up = linear(read, w[f"{name}.mlp.up_proj.weight"])
        x = x + linear(gate * up, w[f"{name}.mlp.down_proj.weight"])
    return norm(x, "norm")


def markov_tokens(folder: Path, logits: Tensor, states: Tensor, before: int):
    """The likeliest token of each row and its chance, as a DSpark draft chooses them.
    logits: [rows, vocab]; states: [rows, hidden]; before: the bonus token."""
    w = load_file(folder / "model.safetensors")
    w1, w2 = (w[f"markov_head.markov_w{k}.weight"] for k in (1, 2))
    memory, chosen = torch.zeros(RANK), []
    for row, state in zip(logits, states, strict=True):
        read = w1[before]
        if "markov_head.joint_proj.weight" in w:
            joint = torch.cat([memory, read, state])
            bias = w["markov_head.joint_proj.bias"]
            parts = linear(joint, w["markov_head.joint_proj.weight"], bias)
            gate, candidate, out = parts.chunk(3)
            gate = gate.sigmoid()
            memory, read = gate * memory + (1 - gate) * candidate.tanh(), out.tanh()
        chances = (row + w2 @ read).softmax(-1)
        before = int(chances.argmax())
        chosen.append((before, float(chances[before])))
    return chosen
