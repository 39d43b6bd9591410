"""Checks of tokenizers and head before weights are loaded, of models in the worker."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_parse.config import ParseConfig, flag_name
from sglang_parse.judge import build_judge_prompt, check_same_tokenizer
from sglang_parse.platform_entry import ATTENTION_BACKEND

# How each attention backend can serve a verify pass (routes.py), the default first;
# docs/decisions/0006-verify-routes.md says why.
ROUTES_OF_BACKEND = {
    ATTENTION_BACKEND: ("mask", "virtual"),
    "flashinfer": ("virtual", "mask"),
    "triton": ("virtual",),
}


def choose_route(asked: str, backend: str) -> str:
    """`mask` or `virtual` for an attention backend.

    asked: the setting `verify_route`. Raises ValueError if the backend is unknown or
    cannot serve what was asked for.
    """
    possible = ROUTES_OF_BACKEND.get(backend)
    if possible is None:
        raise ValueError(
            f"--speculative-algorithm PARSE cannot verify on attention backend "
            f"{backend}; expected one of {', '.join(ROUTES_OF_BACKEND)}."
        )
    if asked == "auto":
        return possible[0]
    if asked not in possible:
        raise ValueError(
            f"{flag_name('verify_route')} is {asked!r}; --attention-backend {backend} "
            f"serves {' or '.join(possible)} alone."
        )
    return asked


def check_architecture(runner: Any, flag: str) -> None:
    """Refuse models whose state cannot branch, or is not known to. Raises ValueError.

    runner: sglang.srt.model_executor.model_runner.ModelRunner with its model loaded:
    ModelConfig alone does not say of every family that it has sliding windows (Gemma 2
    and 3, or any under --disable-hybrid-swa-memory). flag: names the model.
    """
    from sglang.srt.configs.hybrid_arch import mambaish_config
    from sglang.srt.configs.model_config import AttentionArch

    model_config = runner.model_config
    name = model_config.hf_config.architectures[0]
    window = runner.sliding_window_size  # None or -1 without one
    has_window = bool(model_config.is_hybrid_swa) or (
        window is not None and window >= 0
    )
    reasons = (
        # Served for text alone, such a model still wants its own kind of positions.
        ("is multimodal", model_config.is_multimodal or model_config.model_is_mrope),
        ("has a recurrent state", mambaish_config(model_config) is not None),
        ("uses sliding-window attention", has_window),
        ("is an encoder-decoder", model_config.is_encoder_decoder),
        ("has latent attention", model_config.attention_arch == AttentionArch.MLA),
        ("does not generate", not model_config.is_generation),
    )
    for what, holds in reasons:
        if holds:
            raise ValueError(
                f"{flag}: {name} {what}, which --speculative-algorithm PARSE "
                "does not support; choose a decoder-only text model."
            )


def penalty_sentence(defaults: Mapping[str, Any]) -> str:
    """What a repetition penalty of the model's own generation_config.json does, or "".

    defaults: ModelConfig.get_default_sampling_params, which chat requests start from.
    """
    penalty = defaults.get("repetition_penalty")
    if penalty in (None, 1):
        return ""
    return (
        f"The model's generation_config.json sets repetition_penalty {penalty}: chat "
        "requests that name none have it, and PARSE serves those one token a pass; "
        "start with --sampling-defaults openai, or send repetition_penalty 1."
    )


def check_head(server_args: Any, config: ParseConfig) -> None:
    """The EAGLE-3 head was made for this target. Raises ValueError naming the flag."""
    if not config.composes:
        return
    from sglang.srt.utils.hf_transformers_utils import get_config

    path, flag = config.eagle_model_path, flag_name("eagle_model_path")
    trust = server_args.trust_remote_code
    try:
        head = get_config(path, trust_remote_code=trust)
    except (OSError, ValueError) as e:
        raise ValueError(
            f"{flag} is {path!r}, which holds no model: {str(e).splitlines()[0]}"
        ) from e
    target = get_config(server_args.model_path, trust_remote_code=trust)
    names = getattr(head, "architectures", None) or ["a model without architecture"]
    if "Eagle3" not in names[0]:
        raise ValueError(
            f"{flag} is {path!r}, which is {names[0]}; expected an EAGLE-3 head such "
            "as LlamaForCausalLMEagle3."
        )
    width = getattr(head, "target_hidden_size", None) or head.hidden_size
    for what, ours, theirs in (
        ("hidden size", target.hidden_size, width),
        ("vocabulary size", target.vocab_size, head.vocab_size),
    ):
        if ours != theirs:
            raise ValueError(
                f"{flag} is {path!r}, made for a target of {what} {theirs}; "
                f"--model-path has {ours}."
            )


def load_tokenizer(server_args: Any, *, of_draft: bool) -> Any:
    """The tokenizer of the target, or of the draft model, as SGLang loads it."""
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    if of_draft:
        path = server_args.speculative_draft_model_path
        revision = server_args.speculative_draft_model_revision
    else:
        path = server_args.tokenizer_path or server_args.model_path
        revision = server_args.revision
    return get_tokenizer(
        path,
        tokenizer_mode=server_args.tokenizer_mode,
        trust_remote_code=server_args.trust_remote_code,
        revision=revision,
    )


def check_pair(server_args: Any, config: ParseConfig) -> None:
    """Tokenizers agree and every verdict word is one token. Raises ValueError."""
    target = load_tokenizer(server_args, of_draft=False)
    # Without a draft model, clients' texts are the only drafts.
    if server_args.speculative_draft_model_path:
        check_same_tokenizer(target, load_tokenizer(server_args, of_draft=True))
    build_judge_prompt(target, config.judge_suffix, config.verdict_pairs)
