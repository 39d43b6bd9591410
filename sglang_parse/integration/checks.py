"""Checks of tokenizers and of the EAGLE-3 head before weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_parse.integration.extensions import check_asked
from sglang_parse.judging.prompt import check_same_tokenizer
from sglang_parse.options.server import ParseConfig
from sglang_parse.options.table import flag_name


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
    """The tokenizer of the target, or of the draft model, as SGLang loads it.

    Raises ValueError naming the flag.
    """
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    if of_draft:
        flag = "--speculative-draft-model-path"
        path = server_args.speculative_draft_model_path
        revision = server_args.speculative_draft_model_revision
    else:
        flag = "--tokenizer-path" if server_args.tokenizer_path else "--model-path"
        path = server_args.tokenizer_path or server_args.model_path
        revision = server_args.revision
    try:
        return get_tokenizer(
            path,
            tokenizer_mode=server_args.tokenizer_mode,
            trust_remote_code=server_args.trust_remote_code,
            revision=revision,
        )
    except Exception as e:  # of Hugging Face, which names neither
        told = str(e).strip().partition("\n")[0] or type(e).__name__
        raise ValueError(f"{flag} {path!r} has no usable tokenizer: {told}") from e


def check_pair(server_args: Any, config: ParseConfig) -> None:
    """Tokenizers agree, and segmenter and judge can work. Raises ValueError."""
    target = load_tokenizer(server_args, of_draft=False)
    # Without a draft model, clients' texts are the only drafts.
    if server_args.speculative_draft_model_path:
        check_same_tokenizer(target, load_tokenizer(server_args, of_draft=True))
    check_asked(config, target)
