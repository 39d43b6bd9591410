"""The tokenizers of a server's models, as SGLang loads them."""

from __future__ import annotations

from typing import Any, NamedTuple


class TokenizerSource(NamedTuple):
    """Where a tokenizer comes from, and the flag that says so."""

    flag: str
    path: str
    revision: str | None
    mode: str
    trusts_code: bool

    @classmethod
    def of(cls, args: Any, *, of_draft: bool) -> TokenizerSource:
        if of_draft:
            flag = "--speculative-draft-model-path"
            path = args.speculative_draft_model_path
            revision = args.speculative_draft_model_revision
        else:
            flag = "--tokenizer-path" if args.tokenizer_path else "--model-path"
            path, revision = args.tokenizer_path or args.model_path, args.revision
        return cls(flag, path, revision, args.tokenizer_mode, args.trust_remote_code)

    def load(self) -> Any:
        from sglang.srt.utils.hf_transformers_utils import get_tokenizer

        try:
            found = get_tokenizer(
                self.path,
                tokenizer_mode=self.mode,
                trust_remote_code=self.trusts_code,
                revision=self.revision,
            )
        except Exception as e:  # of Hugging Face, which names neither
            told = str(e).strip().partition("\n")[0] or type(e).__name__
            raise ValueError(
                f"{self.flag} {self.path!r} has no usable tokenizer: {told}"
            ) from e
        if not hasattr(found, "get_vocab"):
            raise ValueError(
                f"{self.flag} {self.path!r} has a {type(found).__name__}, which lists "
                "no vocabulary; expected a folder with a tokenizer of Hugging Face's, "
                "such as Qwen/Qwen3-0.6B has."
            )
        return found


def load_tokenizer(server_args: Any, *, of_draft: bool) -> Any:
    """The tokenizer of the target, or of the draft model.

    Raises ValueError naming the flag.
    """
    return TokenizerSource.of(server_args, of_draft=of_draft).load()
