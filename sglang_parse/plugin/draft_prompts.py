"""Has a chat's messages reach the drafters.

SGLang writes the target's prompt from the messages and drops them. The HTTP process
writes what the drafters read into `custom_params` of the request.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sglang_parse.drafting.draft_prompt import (
    CHAT_KEY,
    INTERNAL,
    PROMPT_KEY,
    chat_of,
    render,
)
from sglang_parse.drafting.vocabularies import match_of
from sglang_parse.plugin.flags import config_from_server_args
from sglang_parse.sgl.tokenizers import load_tokenizer


class DraftPrompts:
    """Writes what the drafters of this server read of a chat."""

    def __init__(self, tokenizer: Any = None, *, sends_chats: bool = False) -> None:
        """tokenizer: of a draft with another chat template than the target's, None
        without one. sends_chats: whether there is a draft server."""
        self.tokenizer = tokenizer
        self.sends_chats = sends_chats

    @classmethod
    def of(cls, server_args: Any) -> DraftPrompts:
        """What a PARSE server needs."""
        config = config_from_server_args(server_args)
        return cls(_own_template(server_args), sends_chats=bool(config.draft_url))

    def entries_of(self, body: Mapping[str, Any]) -> dict[str, Any]:
        """Entries of `custom_params`. body: of the chat endpoint."""
        custom = body.get("custom_params")
        if isinstance(custom, Mapping) and custom.get("parse_mode") == "off":
            return {}
        if self.tokenizer is None and not self.sends_chats:
            return {}
        chat = chat_of(body)
        if chat is None:
            return {}
        found: dict[str, Any] = {CHAT_KEY: chat} if self.sends_chats else {}
        if self.tokenizer is not None and (prompt := render(self.tokenizer, chat)):
            found[PROMPT_KEY] = prompt
        return found


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


def _own_template(server_args: Any) -> Any:
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
