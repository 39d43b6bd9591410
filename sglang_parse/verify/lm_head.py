"""Where a target model keeps its LM head."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class LmHead:
    """What turns a target's hidden states into logits."""

    weights: Any
    processor: Any


def _ties(part: Any) -> bool:
    return bool(getattr(getattr(part, "config", None), "tie_word_embeddings", False))


def lm_head_of(model: Any) -> LmHead:
    """The LM head of a model: its own, that of the language model inside a multimodal
    one (sglang/srt/models/gemma3_mm.py), or the embedding where it has no other
    (gemma2.py). Raises ValueError."""
    for part in (model, getattr(model, "language_model", None)):
        weights = getattr(part, "lm_head", None)
        if weights is None and _ties(part):
            weights = getattr(getattr(part, "model", None), "embed_tokens", None)
        processor = getattr(part, "logits_processor", None)
        if weights is not None and processor is not None:
            return LmHead(weights, processor)
    raise ValueError(
        f"--model-path: {type(model).__name__} has no lm_head and logits_processor of "
        "its own, which PARSE needs to read verdicts; choose another target model."
    )
