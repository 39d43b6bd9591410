"""Drafts for the embedded target that do not have its tokenizer."""

from __future__ import annotations

import json
from pathlib import Path

from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from sglang_parse.embedded import DRAFT_PATH
from tests.support.tokenizer_kinds import permuted

# Markers of the embedded pair, and what a draft with a chat template of its own has.
OTHER_MARKERS = (("<|im_start|>", "<|turn|>"), ("<|im_end|>", "<|close|>"))


def write_permuted_draft(path: Path, names=()) -> Path:
    """The embedded draft's weights behind its own tokens under other ids.

    names: (name, other name) of markers.
    """
    path.mkdir(parents=True, exist_ok=True)
    tokenizer, old = permuted(AutoTokenizer.from_pretrained(DRAFT_PATH), names=names)
    tokenizer.save_pretrained(path)
    weights = load_file(DRAFT_PATH / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        rows = weights[name].clone()
        rows[: len(old)] = weights[name][old]
        weights[name] = rows
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    for name in ("config.json", "generation_config.json"):
        config = json.loads((DRAFT_PATH / name).read_text())
        for key in ("eos_token_id", "pad_token_id"):
            config[key] = old.index(config[key])
        (path / name).write_text(json.dumps(config))
    return path


def write_short_draft(path: Path, *, most: int) -> Path:
    """The embedded draft, which reads `most` tokens."""
    path.mkdir(parents=True, exist_ok=True)
    for file in DRAFT_PATH.iterdir():
        if file.name != "config.json":
            (path / file.name).symlink_to(file)
    config = json.loads((DRAFT_PATH / "config.json").read_text())
    config["max_position_embeddings"] = most
    (path / "config.json").write_text(json.dumps(config))
    return path
