"""Which models PARSE can serve: those whose KV cache can branch."""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import AttentionArch


def check_architecture(runner: Any, flag: str) -> None:
    """Refuse models whose state cannot branch, or is not known to. Raises ValueError.

    runner: sglang.srt.model_executor.model_runner.ModelRunner with its model loaded:
    ModelConfig alone does not say of every family that it has sliding windows (Gemma 2
    and 3, or any under --disable-hybrid-swa-memory). flag: names the model.
    """
    model_config = runner.model_config
    for what, holds in _reasons(model_config, runner.sliding_window_size):
        if holds:
            name = model_config.hf_config.architectures[0]
            raise ValueError(
                f"{flag}: {name} {what}, which --speculative-algorithm PARSE "
                "does not support; choose a decoder-only text model."
            )


def _reasons(
    model_config: Any, sliding_window_size: int | None
) -> tuple[tuple[str, bool], ...]:
    """What speaks against a model, and whether it holds. sliding_window_size: None or
    -1 without one."""
    has_window = bool(model_config.is_hybrid_swa) or (
        sliding_window_size is not None and sliding_window_size >= 0
    )
    return (
        # Served for text alone, such a model still wants its own kind of positions.
        ("is multimodal", model_config.is_multimodal or model_config.model_is_mrope),
        ("has a recurrent state", mambaish_config(model_config) is not None),
        ("uses sliding-window attention", has_window),
        ("is an encoder-decoder", model_config.is_encoder_decoder),
        ("has latent attention", model_config.attention_arch == AttentionArch.MLA),
        ("does not generate", not model_config.is_generation),
    )
