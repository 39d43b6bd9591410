"""Which models PARSE can serve: of families it knows, with KV that can branch."""

from __future__ import annotations

from typing import Any

from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.configs.model_config import (
    AttentionArch,
    is_minimax_sparse,
)

from sglang_parse.runtime.families import SEE, refusal_of
from sglang_parse.runtime.names import CPU_ATTENTION_BACKEND

# Attention backends on which a pass of many prefixes is right for such models.
WINDOW_BACKENDS = (CPU_ATTENTION_BACKEND, "triton")
LATENT_BACKENDS = (CPU_ATTENTION_BACKEND,)


def check_architecture(
    runner: Any, flag: str, *, verify_backend: str | None = None, has_head: bool = False
) -> None:
    """Refuse models whose state cannot branch, or is not known to. Raises ValueError.

    runner: sglang.srt.model_executor.model_runner.ModelRunner with its model loaded:
    ModelConfig alone does not say of every family that it has sliding windows (Gemma 2
    and 3, or any under --disable-hybrid-swa-memory). flag: names the model.
    verify_backend: attention backend of the target's passes, None for a draft.
    has_head: whether an EAGLE-3 head reads this target.
    """
    model_config = runner.model_config
    name = model_config.hf_config.architectures[0]
    why = refusal_of(name) or next(
        (what for what, holds in _reasons(model_config) if holds), ""
    )
    if why:
        raise ValueError(
            f"{flag}: {name} {why}, which --speculative-algorithm PARSE does not "
            f"support; {SEE}."
        )
    if verify_backend is not None:
        _check_backend(runner, name, flag, verify_backend)
    if has_head and model_config.is_multimodal:
        raise ValueError(
            f"{flag}: {name} is multimodal, and an EAGLE-3 head cannot read images; "
            "leave out --speculative-parse-compose eagle3."
        )


def has_window(runner: Any) -> bool:
    """Whether some layer of a model sees the last tokens alone."""
    size = runner.sliding_window_size
    return bool(runner.model_config.is_hybrid_swa) or (size is not None and size >= 0)


def _check_backend(runner: Any, name: str, flag: str, backend: str) -> None:
    if runner.model_config.is_hybrid_swa and backend != CPU_ATTENTION_BACKEND:
        # SGLang divides memory between both pools and leaves none to what drafts.
        raise ValueError(
            f"{flag}: {name} has a KV pool of its own for sliding windows, beside "
            "which PARSE cannot budget a draft; add --disable-hybrid-swa-memory."
        )
    is_latent = runner.model_config.attention_arch == AttentionArch.MLA
    for what, holds, possible in (
        ("has sliding windows", has_window(runner), WINDOW_BACKENDS),
        ("has latent attention", is_latent, LATENT_BACKENDS),
    ):
        if holds and backend not in possible:
            raise ValueError(
                f"{flag}: {name} {what}, which PARSE cannot verify on "
                f"--attention-backend {backend}; expected {' or '.join(possible)}."
            )


def _reasons(model_config: Any) -> tuple[tuple[str, bool], ...]:
    """What speaks against a model whatever its family, and whether it holds."""
    hf_config = model_config.hf_config
    return (
        ("has a recurrent state", mambaish_config(model_config) is not None),
        ("is an encoder-decoder", model_config.is_encoder_decoder),
        ("does not generate", not model_config.is_generation),
        ("has block-sparse attention", is_minimax_sparse(hf_config)),
        (
            "attends within chunks of the context",
            bool(getattr(model_config, "attention_chunk_size", None)),
        ),
    )
