"""Has a draft in text read a chat in its own template.

SGLang writes the target's prompt from the messages and drops them. The HTTP process
writes the draft's prompt into `custom_params` of the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_parse.drafting.draft_prompt import INTERNAL, PROMPT_KEY, chat_of, render
from sglang_parse.drafting.vocabularies import match_of
from sglang_parse.sgl.tokenizers import load_tokenizer


def prompt_entries(tokenizer: Any, body: Mapping[str, Any]) -> dict[str, Any]:
    """Entries of `custom_params`. tokenizer: of `draft_with_template`. body: of the
    chat endpoint."""
    custom = body.get("custom_params")
    is_off = isinstance(custom, Mapping) and custom.get("parse_mode") == "off"
    if is_off or tokenizer is None or (chat := chat_of(body)) is None:
        return {}
    prompt = render(tokenizer, chat)
    return {PROMPT_KEY: prompt} if prompt else {}


def set_entries(obj: Any, entries: Mapping[str, Any]) -> None:
    """Put our entries in place of any that a client sent, whatever carried them.

    obj: SGLang's GenerateReqInput or EmbeddingReqInput before it is read.
    """
    given = getattr(obj, "sampling_params", None)
    for params in given if isinstance(given, list) else [given]:
        if not isinstance(params, dict):
            continue
        custom = params.get("custom_params")
        if isinstance(custom, dict):
            own = {k: v for k, v in custom.items() if not str(k).startswith(INTERNAL)}
            params["custom_params"] = {**own, **entries}
        elif custom is None and entries:
            params["custom_params"] = dict(entries)


def draft_with_template(server_args: Any) -> Any:
    """The draft's tokenizer where it drafts in text and its chat template is not the
    target's; else None."""
    if not server_args.speculative_draft_model_path:
        return None
    if match_of(server_args).shares_ids:
        return None
    draft = load_tokenizer(server_args, of_draft=True)
    own = getattr(draft, "chat_template", None)
    if server_args.chat_template is None:
        target = load_tokenizer(server_args, of_draft=False)
        if own == getattr(target, "chat_template", None):
            return None
    return draft if own else None
