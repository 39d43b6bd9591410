"""Which models PARSE can serve: of families it knows, with KV that can branch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from sglang.srt.configs.model_config import AttentionArch, is_minimax_sparse

from sglang_parse.sgl.families import EXPECTED, family_of
from sglang_parse.sgl.names import CPU_ATTENTION_BACKEND, SPARSE_ATTENTION

# Attention backends on which a pass of many prefixes is right for such models.
WINDOW_BACKENDS = (CPU_ATTENTION_BACKEND, "triton", "fa3")
LATENT_BACKENDS = (CPU_ATTENTION_BACKEND, "triton", "flashinfer")
# FlashInfer puts a prefill after a cached prefix of latent KV together from parts of
# SGLang's own batches. A draft model runs such prefills, and so does a head.
LATENT_PREFILL_BACKENDS = (CPU_ATTENTION_BACKEND, "triton")

#: Whether something speaks against a model, and the sentence that says so.
Reason = tuple[bool, str]


def check_architecture(
    runner: Any,
    flag: str,
    *,
    backends: Sequence[str] = (),
    is_draft: bool = False,
    is_head: bool = False,
    head: str = "",
    brings_back: bool = False,
) -> None:
    """Refuse models whose state cannot branch, or is not known to. Raises ValueError.

    runner: sglang.srt.model_executor.model_runner.ModelRunner with its model loaded:
    ModelConfig alone does not say of every family that it has sliding windows (Gemma 2
    and 3, or any under --disable-hybrid-swa-memory). flag: names the model.
    backends: attention backends of its prefills and steps. is_draft: whether it drafts,
    and no pass runs on it; is_head: as the head of a target. head: the setting
    `compose` where a head reads this target. brings_back: whether there is a
    hierarchical cache.
    """
    name = runner.model_config.hf_config.architectures[0]
    for holds, what in (
        *_reasons(runner, name, is_head=is_head),
        *(
            reason
            for backend in backends
            for reason in _reasons_of_backend(runner, name, backend, is_draft=is_draft)
        ),
        *_reasons_of_latent_kv(runner, backends, head=head),
        *_reasons_of_readers(runner, name, head=head),
        *_reasons_of_cache(runner, name, brings_back),
    ):
        if holds:
            raise ValueError(f"{flag}: {what.format(name=name)}.")


def has_latent_kv(runner: Any) -> bool:
    """Whether all heads of a model share one compressed key and value."""
    return bool(runner.model_config.attention_arch == AttentionArch.MLA)


def has_window(runner: Any) -> bool:
    """Whether some layer of a model sees the last tokens alone."""
    size = runner.sliding_window_size
    return bool(runner.model_config.is_hybrid_swa) or (size is not None and size >= 0)


def _reasons(runner: Any, name: str, *, is_head: bool) -> Iterator[Reason]:
    """What speaks against a model whatever serves it."""
    config, family = runner.model_config, family_of(name)
    for holds, why in (
        (bool(family.why), family.why),
        (config.is_encoder_decoder, "is an encoder-decoder"),
        (not config.is_generation, "does not generate"),
        (is_minimax_sparse(config.hf_config), "has block-sparse attention"),
        (
            bool(getattr(config, "attention_chunk_size", None)),
            "attends within chunks of the context",
        ),
    ):
        yield holds, f"{{name}} {why}; {EXPECTED}"
    yield (
        family.head and not is_head,
        "SGLang serves this model as {name}, the head of a target; expected a model "
        "that writes by itself, or the head beside its target by "
        "--speculative-parse-compose",
    )


def _reasons_of_backend(
    runner: Any, name: str, backend: str, *, is_draft: bool
) -> Iterator[Reason]:
    """What speaks against a model on one attention backend."""
    is_sparse = family_of(name).chains
    yield (
        is_sparse and is_draft,
        "{name} has sparse attention with an index, with which no test of PARSE has "
        "shown a draft; expected another draft model",
    )
    yield (
        is_sparse != (backend == SPARSE_ATTENTION),
        f"{{name}} cannot be served on --attention-backend {backend}; expected "
        + (SPARSE_ATTENTION if is_sparse else "another, which it has no index for"),
    )
    if is_sparse:
        return
    is_hybrid = runner.model_config.is_hybrid_swa
    if not is_draft:
        # SGLang divides memory between both pools and leaves none to what drafts.
        yield (
            is_hybrid and backend != CPU_ATTENTION_BACKEND,
            "{name} has a KV pool of its own for sliding windows, beside which PARSE "
            "cannot budget a draft; add --disable-hybrid-swa-memory",
        )
        yield (
            is_hybrid and getattr(runner, "page_size", 1) > 1,
            "{name} keeps windows in a pool of their own, which PARSE does not serve "
            "in pages; add --page-size 1",
        )
    windows = (*WINDOW_BACKENDS, "flashinfer") if is_draft else WINDOW_BACKENDS
    latent = LATENT_PREFILL_BACKENDS if is_draft else LATENT_BACKENDS
    for holds, what, possible in (
        (has_window(runner), "sliding windows", windows),
        (has_latent_kv(runner), "latent attention", latent),
    ):
        yield (
            holds and backend not in possible,
            f"{{name}} has {what}, which PARSE cannot serve on --attention-backend "
            f"{backend}; expected {' or '.join(possible)}",
        )


def _reasons_of_latent_kv(
    runner: Any, backends: Sequence[str], *, head: str
) -> Iterator[Reason]:
    """FlashInfer's latent attention reads no cached prompt again."""
    yield (
        bool(head) and has_latent_kv(runner) and "flashinfer" in backends,
        "{name} has latent attention, which FlashInfer cannot serve with "
        f"--speculative-parse-compose {head}; leave it out, or add --attention-backend "
        "triton",
    )


def _reasons_of_readers(runner: Any, name: str, *, head: str) -> Iterator[Reason]:
    """What reads the target's hidden states beside the passes."""
    yield (
        bool(head) and family_of(name).chains,
        "{name} has sparse attention with an index, with which no test of PARSE has "
        f"shown a head; leave out --speculative-parse-compose {head}",
    )
    yield (
        bool(head) and runner.model_config.is_multimodal,
        "{name} is multimodal, and its head cannot read images; leave out "
        f"--speculative-parse-compose {head}",
    )


def _reasons_of_cache(runner: Any, name: str, brings_back: bool) -> Iterator[Reason]:
    """No test has shown these beside a hierarchical cache."""
    for holds, what in (
        (has_window(runner), "sliding windows"),
        (family_of(name).chains, "sparse attention with an index"),
    ):
        yield (
            brings_back and holds,
            f"{{name}} has {what}, which PARSE does not serve with "
            "--enable-hierarchical-cache; leave it out",
        )
