"""The head as a folder that SGLang's LlamaForCausalLMEagle3 loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from benchmarks.real_model.convert import write_json
from benchmarks.train_pair.export import fill_head, head_state_dict, hf_config
from benchmarks.train_real.target import RealHead, RealTarget


def export_head(head: RealHead, target: RealTarget, tokenizer: Any, path: Path) -> None:
    """Weights in float16, the embedding left to the target; `d2t` names the tokens.

    d2t: [draft vocab] int64, a row's token less the row.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = hf_config(head.cfg, tokenizer)
    config |= {
        "architectures": ["LlamaForCausalLMEagle3"],
        "vocab_size": target.embed.shape[0],
        "draft_vocab_size": len(target.tokens),
        "max_position_embeddings": target.config.max_position_embeddings,
        "torch_dtype": "bfloat16",
    }
    write_json(path / "config.json", config)
    weights = head_state_dict(head) | {"fc.weight": head.exported_fc()}
    weights = {k: v.half() for k, v in weights.items()}
    weights["d2t"] = target.tokens - torch.arange(len(target.tokens))
    unfinished = path / "model.safetensors.part"
    save_file(weights, unfinished, metadata={"format": "pt"})
    unfinished.chmod(0o644)
    unfinished.replace(path / "model.safetensors")


def go_on_from(head: RealHead, path: Path) -> None:
    """Give `head` the weights of an exported head, which may have other tokens.

    A token that the exported head lacks keeps its row of the target. The features must
    have been scaled before.
    """
    weights = load_file(path / "model.safetensors")
    tokens = weights["d2t"] + torch.arange(len(weights["d2t"]))
    shared = torch.isin(tokens, head.tokens)
    rows = head.head.detach().clone()
    found = torch.searchsorted(head.tokens, tokens[shared])
    rows[found] = weights["lm_head.weight"][shared].float()
    weights["lm_head.weight"] = rows
    weights["fc.weight"] = weights["fc.weight"] * head.sizes
    fill_head(head, weights)
