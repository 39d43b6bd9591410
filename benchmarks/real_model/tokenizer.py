"""The tokenizer of a GGUF file: byte-level BPE that splits digits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

CONTROL = 3  # GGUF's token type of special tokens
SPLIT = "smollm"  # the only rule of splitting that is known here


def save_tokenizer(fields: Mapping[str, Any], out: Path) -> None:
    """tokenizer.json, tokenizer_config.json and the chat template into `out`.

    Raises ValueError for a file whose tokenizer splits by another rule.
    """
    own = {k.removeprefix("tokenizer.ggml."): v for k, v in fields.items()}
    if own["pre"] != SPLIT:
        raise ValueError(f"tokenizer.ggml.pre is {own['pre']!r}, expected {SPLIT!r}.")
    build_tokenizer(own).save(str(out / "tokenizer.json"))
    template = fields["tokenizer.chat_template"]
    (out / "chat_template.jinja").write_text(template, encoding="utf-8")
    settings = tokenizer_config(own, fields["llama.context_length"])
    text = json.dumps(settings, indent=2) + "\n"
    (out / "tokenizer_config.json").write_text(text, encoding="utf-8")


def build_tokenizer(own: Mapping[str, Any]) -> Tokenizer:
    """own: fields without their prefix: tokens, token_type, merges."""
    vocab = {token: i for i, token in enumerate(own["tokens"])}
    merges = [tuple(pair.split(" ")) for pair in own["merges"]]
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    kinds = zip(own["tokens"], own["token_type"], strict=True)
    special = [t for t, kind in kinds if kind == CONTROL]
    tokenizer.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in special]
    )
    return tokenizer


def tokenizer_config(own: Mapping[str, Any], longest: int) -> dict[str, Any]:
    """Settings of transformers' PreTrainedTokenizerFast. longest: tokens of a text."""
    names = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
    special = {
        f"{ours}_token": own["tokens"][own[f"{theirs}_token_id"]]
        for ours, theirs in names.items()
    }
    return {
        "clean_up_tokenization_spaces": False,
        "model_max_length": longest,
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
    }
