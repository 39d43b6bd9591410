"""Has a chat's messages reach who drafts, in the HTTP process.

SGLang writes the target's prompt from them and lets them go.
"""

from __future__ import annotations

from typing import Any

from sglang_parse.drafting.draft_prompt import CHAT_KEY, PROMPT_KEY, chat_of, render
from sglang_parse.integration.flags import config_from_server_args
from sglang_parse.runtime.tokenizers import agreement_of, load_tokenizer


class DraftPrompts:
    """Puts into `custom_params` what the drafters of this server read."""

    def __init__(self, tokenizer: Any = None, *, sends_chats: bool = False) -> None:
        """tokenizer: of a draft with another chat template than the target's, None
        without one. sends_chats: whether a draft server is asked by its chat route."""
        self.tokenizer = tokenizer
        self.sends_chats = sends_chats

    @classmethod
    def of(cls, server_args: Any) -> DraftPrompts:
        """What a PARSE server needs."""
        config = config_from_server_args(server_args)
        return cls(_own_template(server_args), sends_chats=bool(config.draft_url))

    def add_to(self, body: dict[str, Any]) -> None:
        """body: of the chat endpoint, which is left as it is where nobody reads it."""
        custom = body.get("custom_params") or {}
        if not isinstance(custom, dict) or custom.get("parse_mode") == "off":
            return
        if self.tokenizer is None and not self.sends_chats:
            return
        chat = chat_of(body)
        if chat is None:
            return
        found: dict[str, Any] = {CHAT_KEY: chat} if self.sends_chats else {}
        if self.tokenizer is not None:
            prompt = render(self.tokenizer, chat)
            found |= {PROMPT_KEY: prompt} if prompt else {}
        if found:
            body["custom_params"] = custom | found


def _own_template(server_args: Any) -> Any:
    """The draft's tokenizer where it drafts in text and its chat template is not the
    target's; else None."""
    if not server_args.speculative_draft_model_path:
        return None
    if agreement_of(server_args).shares_ids:
        return None
    draft = load_tokenizer(server_args, of_draft=True)
    own = getattr(draft, "chat_template", None)
    if server_args.chat_template is None:
        target = load_tokenizer(server_args, of_draft=False)
        if own == getattr(target, "chat_template", None):
            return None
    return draft if own else None
