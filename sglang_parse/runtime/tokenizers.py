"""The tokenizers of a server's models, as SGLang loads them."""

from __future__ import annotations

import functools
from typing import Any

from sglang_parse.judging.vocabularies import Agreement, compare


def load_tokenizer(server_args: Any, *, of_draft: bool) -> Any:
    """The tokenizer of the target, or of the draft model.

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
        found = get_tokenizer(
            path,
            tokenizer_mode=server_args.tokenizer_mode,
            trust_remote_code=server_args.trust_remote_code,
            revision=revision,
        )
    except Exception as e:  # of Hugging Face, which names neither
        told = str(e).strip().partition("\n")[0] or type(e).__name__
        raise ValueError(f"{flag} {path!r} has no usable tokenizer: {told}") from e
    if not hasattr(found, "get_vocab"):
        raise ValueError(
            f"{flag} {path!r} has a {type(found).__name__}, which lists no vocabulary; "
            "expected a folder with a tokenizer of Hugging Face's, such as "
            "Qwen/Qwen3-0.6B has."
        )
    return found


def agreement_of(server_args: Any) -> Agreement:
    """How far the tokenizers of target and draft model agree; found once a process.

    Raises ValueError naming the flag of one that cannot be loaded.
    """
    return _agreement_of(_Models(server_args))


class _Models:
    """The models of a server, equal where their tokenizers are."""

    def __init__(self, server_args: Any) -> None:
        self.server_args = server_args
        self.key = (
            server_args.tokenizer_path or server_args.model_path,
            server_args.revision,
            server_args.tokenizer_mode,
            server_args.trust_remote_code,
            server_args.speculative_draft_model_path,
            server_args.speculative_draft_model_revision,
        )

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Models) and self.key == other.key

    def __hash__(self) -> int:
        return hash(self.key)


@functools.lru_cache(1)
def _agreement_of(models: _Models) -> Agreement:
    target, draft = (
        load_tokenizer(models.server_args, of_draft=of_draft)
        for of_draft in (False, True)
    )
    return compare(target, draft)
