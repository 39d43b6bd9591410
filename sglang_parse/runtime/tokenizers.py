"""The tokenizers of a server's models, as SGLang loads them."""

from __future__ import annotations

from typing import Any


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
        return get_tokenizer(
            path,
            tokenizer_mode=server_args.tokenizer_mode,
            trust_remote_code=server_args.trust_remote_code,
            revision=revision,
        )
    except Exception as e:  # of Hugging Face, which names neither
        told = str(e).strip().partition("\n")[0] or type(e).__name__
        raise ValueError(f"{flag} {path!r} has no usable tokenizer: {told}") from e
