"""Start checks of the pair: draft model, tokenizers, the target's head."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any

import torch

from sglang_parse.drafting.text_bridge import TextEncoder
from sglang_parse.drafting.token_names import TextError
from sglang_parse.drafting.vocabularies import TokenizerMatch, compare
from sglang_parse.judging.extension_rules import load_rule
from sglang_parse.judging.judges import open_judge
from sglang_parse.options.judge_names import QUESTION_JUDGE
from sglang_parse.options.segmenters import SEGMENTER_EXTENSIONS
from sglang_parse.options.server import ParseConfig
from sglang_parse.options.table import (
    DFLASH,
    DSPARK,
    EAGLE3,
    HEADS_OF_PATH,
    MTP,
    flag_name,
)
from sglang_parse.options.validation import DRAFT_KEY_ENV
from sglang_parse.remote.remote_protocol import check_key
from sglang_parse.sgl.families import EXPECTED, SMALL_DRAFT, UNKNOWN, family_of
from sglang_parse.sgl.model_folder import architectures_of
from sglang_parse.sgl.mtp import MODELS, check_mtp
from sglang_parse.sgl.names import SPARSE_ATTENTION
from sglang_parse.sgl.tokenizers import load_tokenizer

DRAFT_FLAG = "--speculative-draft-model-path"


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


#: What the architecture of a head's checkpoint has in its name, and what it is called.
HEADS_OF_PATH_ARE = {
    EAGLE3: ("Eagle3", "an EAGLE-3 head such as LlamaForCausalLMEagle3"),
    DFLASH: ("DFlashDraftModel", "a DFLASH draft, a DFlashDraftModel"),
    DSPARK: ("DSpark", "a DSpark draft such as Qwen3DSparkModel"),
}


def check_head(server_args: Any, config: ParseConfig) -> None:
    """Each head was made for its model. Raises ValueError naming the flag."""
    for option in MODELS:
        if getattr(config, option) == MTP:
            check_mtp(server_args, option)
    for option, kind, field, flag in (
        ("eagle_model_path", config.compose, "model_path", "--model-path"),
        (
            *("draft_eagle_model_path", config.draft_guesser),
            *("speculative_draft_model_path", DRAFT_FLAG),
        ),
    ):
        if kind in HEADS_OF_PATH:
            head = getattr(config, option), flag_name(option)
            model = getattr(server_args, field), flag
            _check_head(*head, kind, *model, server_args.trust_remote_code)


def _check_head(
    path: str, flag: str, kind: str, model_path: str, model_flag: str, trust: bool
) -> None:
    from sglang.srt.utils.hf_transformers_utils import get_config

    try:
        head = get_config(path, trust_remote_code=trust)
    except (OSError, ValueError) as e:
        raise ValueError(
            f"{flag} is {path!r}, which holds no model: {str(e).splitlines()[0]}"
        ) from e
    target = get_config(model_path, trust_remote_code=trust)
    names = getattr(head, "architectures", None) or ["a model without architecture"]
    part, wanted = HEADS_OF_PATH_ARE[kind]
    if part not in names[0]:
        raise ValueError(f"{flag} is {path!r}, which is {names[0]}; expected {wanted}.")
    width = getattr(head, "target_hidden_size", None) or head.hidden_size
    for what, ours, theirs in (
        ("hidden size", target.hidden_size, width),
        ("vocabulary size", target.vocab_size, head.vocab_size),
    ):
        if ours != theirs:
            raise ValueError(
                f"{flag} is {path!r}, made for a target of {what} {theirs}; "
                f"{model_flag} has {ours}."
            )


def check_draft_model(server_args: Any, config: ParseConfig) -> None:
    """The draft model is named by SGLang's flag and ours, or by neither."""
    config.check_draft_model(server_args.speculative_draft_model_path)


def check_families(server_args: Any, config: ParseConfig) -> None:
    """Neither the target nor the draft is of a family that is refused, before SGLang
    looks at it. Raises ValueError. What has no config.json yet passes."""
    for flag, path, revision in (
        ("--model-path", server_args.model_path, server_args.revision),
        (
            DRAFT_FLAG,
            server_args.speculative_draft_model_path,
            server_args.speculative_draft_model_revision,
        ),
    ):
        if not path:
            continue
        for name in architectures_of(path, revision):
            family = family_of(name)
            if family.why and family is not UNKNOWN:
                raise ValueError(f"{flag} {path!r}: {name} {family.why}; {EXPECTED}.")
            if family.chains and flag != DRAFT_FLAG:
                _check_sparse(server_args, f"{flag} {path!r}: {name}")


def _check_sparse(server_args: Any, what: str) -> None:
    """SGLang's kernels of sparse attention run on GPUs, and its own sentence about the
    backend comes late, or not at all."""
    backend = server_args.attention_backend
    if backend != SPARSE_ATTENTION and (backend or not torch.cuda.is_available()):
        raise ValueError(
            f"{what} has sparse attention with an index, which PARSE serves on a GPU "
            f"with --attention-backend {SPARSE_ATTENTION} alone; expected that, or "
            "another model."
        )


def check_pair(server_args: Any, config: ParseConfig) -> None:
    """The draft, if there is one, can write for the target. Raises ValueError."""
    target = load_tokenizer(server_args, of_draft=False)
    if server_args.speculative_draft_model_path:
        draft = load_tokenizer(server_args, of_draft=True)
        check_draft_pages(server_args, check_draft_tokenizer(target, draft))
    if config.draft_url:
        check_key(os.environ.get(DRAFT_KEY_ENV, ""))
        try:
            TextEncoder(target)
        except TextError as e:
            raise ValueError(
                f"{flag_name('draft_url')} needs a target whose tokens are known as "
                f"text, but of its tokenizer {e}."
            ) from e


def check_extensions(server_args: Any, config: ParseConfig) -> None:
    """The segmenter and the judge can be used. Raises ValueError naming the flag, or
    the package and its flag."""
    tokenizer = load_tokenizer(server_args, of_draft=False)

    def ask() -> object:
        judge = open_judge(config.judge, tokenizer, config.verdict_pairs)
        return judge.ask(config.judge_suffix)

    if config.segmenter in SEGMENTER_EXTENSIONS.found:
        _load("segmenter", config.segmenter, lambda: load_rule(config.segmenter))
    if config.judge == QUESTION_JUDGE:
        ask()
    else:
        _load("judge", config.judge, ask)


def _load(field: str, name: str, load: Callable[[], object]) -> None:
    try:
        load()
    except ValueError as e:
        raise ValueError(f"{flag_name(field)} is {name!r}: {e}") from e


def check_draft_pages(server_args: Any, agreement: TokenizerMatch) -> None:
    """A draft in text takes its own KV slots one by one. Raises ValueError."""
    page = server_args.page_size or 1
    if page > 1 and not agreement.shares_ids:
        is_fixed = getattr(server_args, "attention_backend", "") == SPARSE_ATTENTION
        one = "" if is_fixed else "--page-size 1, or "
        raise ValueError(
            f"--page-size is {page}, and the draft's tokenizer is not the target's "
            f"({agreement.difference}); expected {one}a draft with the target's "
            "tokenizer."
        )


def check_draft_tokenizer(target: Any, draft: Any) -> TokenizerMatch:
    """How a draft reaches the target. Raises ValueError where it cannot."""
    agreement = compare(target, draft)
    if agreement.shares_ids:
        return agreement
    for tokenizer, whose, advice in (
        (target, "the target's", "take a draft with the target's own tokenizer"),
        (draft, "the draft's", f"a draft such as {SMALL_DRAFT} works"),
    ):
        try:
            TextEncoder(tokenizer)
        except TextError as e:
            raise ValueError(
                f"{DRAFT_FLAG} needs the target's tokenizer, or two "
                f"whose tokens are known as text, but {agreement.difference}, and of "
                f"{whose} {e}; {advice}."
            ) from e
    return agreement
