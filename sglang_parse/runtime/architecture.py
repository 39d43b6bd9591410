"""Which models PARSE can serve: of families it knows, with KV that can branch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang.srt.configs.hybrid_arch import hybrid_gdn_config, mambaish_config
from sglang.srt.configs.model_config import (
    AttentionArch,
    is_minimax_sparse,
)

from sglang_parse.options.table import EAGLE3
from sglang_parse.runtime.families import SEE, names_a_head, refusal_of
from sglang_parse.runtime.names import CPU_ATTENTION_BACKEND

# Attention backends on which a pass of many prefixes is right for such models.
WINDOW_BACKENDS = (CPU_ATTENTION_BACKEND, "triton", "fa3")
LATENT_BACKENDS = (CPU_ATTENTION_BACKEND, "triton", "flashinfer")
# FlashInfer's prefills behind a cached prefix of latent KV are put together from parts
# of SGLang's own batches. A draft runs such prefills, and so does a head.
LATENT_PREFILL_BACKENDS = (CPU_ATTENTION_BACKEND, "triton")
RECURRENT_BACKENDS = (CPU_ATTENTION_BACKEND,)


def check_architecture(
    runner: Any,
    flag: str,
    *,
    backends: Sequence[str] = (),
    is_draft: bool = False,
    is_head: bool = False,
    head: str = "",
    has_probe: bool = False,
    route: str = "auto",
    brings_back: bool = False,
) -> None:
    """Refuse models whose state cannot branch, or is not known to. Raises ValueError.

    runner: sglang.srt.model_executor.model_runner.ModelRunner with its model loaded:
    ModelConfig alone does not say of every family that it has sliding windows (Gemma 2
    and 3, or any under --disable-hybrid-swa-memory). flag: names the model.
    backends: attention backends of its prefills and steps. is_draft: whether it drafts,
    and no pass runs on it; is_head: as the head of a target. head: the setting
    `compose` where a head reads this target. has_probe: whether a probe does. route:
    the setting `verify_route`. brings_back: whether there is a hierarchical cache.
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
    if names_a_head(name) and not is_head:
        raise ValueError(
            f"{flag}: SGLang serves this model as {name}, the head of a target; "
            "expected a model that writes by itself, or the head beside its target by "
            "--speculative-parse-compose."
        )
    for backend in backends:
        if not is_draft:
            _check_pools(runner, name, flag, backend)
        _check_kinds(runner, name, flag, backend, is_draft=is_draft)
    if has_latent_kv(runner) and "flashinfer" in backends:
        _check_latent(name, flag, head=head, route=route)
    if has_recurrent_state(runner):
        _check_readers(name, flag, head=head, has_probe=has_probe)
    if brings_back:
        _check_brings_back(runner, name, flag)
    if head and model_config.is_multimodal:
        raise ValueError(
            f"{flag}: {name} is multimodal, and its head cannot read images; leave out "
            f"--speculative-parse-compose {head}."
        )


def has_recurrent_state(runner: Any) -> bool:
    """Whether some layer of a model keeps a state besides KV.

    Of such families SGLang takes a draft for the MTP head, whose layer keeps none.
    """
    if getattr(runner, "is_draft_worker", False):
        return False
    return mambaish_config(runner.model_config) is not None


def has_latent_kv(runner: Any) -> bool:
    """Whether all heads of a model share one compressed key and value."""
    return bool(runner.model_config.attention_arch == AttentionArch.MLA)


def has_window(runner: Any) -> bool:
    """Whether some layer of a model sees the last tokens alone."""
    size = runner.sliding_window_size
    return bool(runner.model_config.is_hybrid_swa) or (size is not None and size >= 0)


def _check_readers(name: str, flag: str, *, head: str, has_probe: bool) -> None:
    """Nothing asks for forwards that begin behind or before the state."""
    for holds, what, advice in (
        (
            head == EAGLE3,
            "what an EAGLE-3 head reads of a cached prompt",
            "--speculative-parse-compose eagle3",
        ),
        (
            has_probe,
            "a verdict that a probe leaves in doubt",
            "--speculative-parse-probe and --speculative-parse-probe-collect",
        ),
    ):
        if holds:
            raise ValueError(
                f"{flag}: {name} has a recurrent state, from which {what} cannot be "
                f"computed; leave out {advice}."
            )


def _check_brings_back(runner: Any, name: str, flag: str) -> None:
    """What no test has shown beside a hierarchical cache is left out."""
    for holds, what in (
        (has_recurrent_state(runner), "a recurrent state"),
        (has_window(runner), "sliding windows"),
    ):
        if holds:
            raise ValueError(
                f"{flag}: {name} has {what}, which PARSE does not serve with "
                "--enable-hierarchical-cache; leave it out."
            )


def _check_latent(name: str, flag: str, *, head: str, route: str) -> None:
    """FlashInfer's latent attention takes no mask, and reads no cached prompt again."""
    for holds, what in (
        (head, f"--speculative-parse-compose {head}"),
        (route == "mask", "--speculative-parse-verify-route mask"),
    ):
        if holds:
            raise ValueError(
                f"{flag}: {name} has latent attention, which FlashInfer cannot serve "
                f"with {what}; leave it out, or add --attention-backend triton."
            )


def _check_pools(runner: Any, name: str, flag: str, backend: str) -> None:
    is_hybrid = runner.model_config.is_hybrid_swa
    if is_hybrid and backend != CPU_ATTENTION_BACKEND:
        # SGLang divides memory between both pools and leaves none to what drafts.
        raise ValueError(
            f"{flag}: {name} has a KV pool of its own for sliding windows, beside "
            "which PARSE cannot budget a draft; add --disable-hybrid-swa-memory."
        )
    two_pools = is_hybrid or has_recurrent_state(runner)
    if two_pools and getattr(runner, "page_size", 1) > 1:
        raise ValueError(
            f"{flag}: {name} keeps windows or states in a pool of their own, which "
            "PARSE does not serve in pages; add --page-size 1."
        )


def _check_kinds(
    runner: Any, name: str, flag: str, backend: str, *, is_draft: bool
) -> None:
    for what, holds, of_target, of_draft in (
        (
            "sliding windows",
            has_window(runner),
            WINDOW_BACKENDS,
            (*WINDOW_BACKENDS, "flashinfer"),
        ),
        (
            "latent attention",
            has_latent_kv(runner),
            LATENT_BACKENDS,
            LATENT_PREFILL_BACKENDS,
        ),
        (
            "a recurrent state",
            has_recurrent_state(runner),
            RECURRENT_BACKENDS,
            RECURRENT_BACKENDS,
        ),
    ):
        possible = of_draft if is_draft else of_target
        if holds and backend not in possible:
            raise ValueError(
                f"{flag}: {name} has {what}, which PARSE cannot serve on "
                f"--attention-backend {backend}; expected {' or '.join(possible)}."
            )


def _reasons(model_config: Any) -> tuple[tuple[str, bool], ...]:
    """What speaks against a model whatever its family, and whether it holds."""
    hf_config = model_config.hf_config
    return (
        (
            "has a recurrent state other than that of gated delta nets",
            mambaish_config(model_config) is not None
            and hybrid_gdn_config(model_config) is None,
        ),
        ("is an encoder-decoder", model_config.is_encoder_decoder),
        ("does not generate", not model_config.is_generation),
        ("has block-sparse attention", is_minimax_sparse(hf_config)),
        (
            "attends within chunks of the context",
            bool(getattr(model_config, "attention_chunk_size", None)),
        ),
    )
