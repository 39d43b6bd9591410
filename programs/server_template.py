"""The chat template of a server, as SGLang's frontend language wants it.

The frontend guesses a template by the model's path as the server names it. Here the
server itself renders conversations of marked messages, and the text around the marks
is the template.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import requests
from sglang.lang.chat_template import ChatTemplate

TIMEOUT_S = 30
SYSTEM, USER, ASSISTANT, NEXT = (f"Mark{word}" for word in ("One", "Two", "Ten", "Six"))


@dataclass
class ServerTemplate(ChatTemplate):
    """Text in front of the first user's message differs from that of later ones."""

    first_user_prefix: str = ""

    def get_prefix_and_suffix(self, role: str, hist_messages: Any) -> tuple[str, str]:
        prefix, suffix = super().get_prefix_and_suffix(role, hist_messages)
        if role == "user" and not hist_messages:
            prefix = self.first_user_prefix
        return prefix, suffix


def server_template(url: str) -> ServerTemplate:
    """What the server at `url` puts around messages.

    Raises ValueError or requests.RequestException where the server cannot tell, or its
    template changes what is said.
    """
    first, opening = _around(url, [USER])
    _, _, closing, _ = _around(url, [USER, ASSISTANT, NEXT])
    user = _common_end(first, closing)
    roles = {
        "user": (user, ""),
        "assistant": (opening, closing.removesuffix(user)),
    }
    try:
        system, behind, _ = _around(url, [SYSTEM, USER])
        roles["system"] = (system, behind.removesuffix(user))
    except ValueError:  # a template may know no system prompt
        roles["system"] = ("", "")
    return ServerTemplate(url, "", roles, first_user_prefix=first)


def _around(url: str, contents: list[str]) -> list[str]:
    """Text before, between and after the messages, as a chat completion has it."""
    role = {SYSTEM: "system", ASSISTANT: "assistant"}
    messages = [{"role": role.get(one, "user"), "content": one} for one in contents]
    ids = _ask(url, "/tokenize", {"messages": messages})["tokens"]
    # The server puts these in front of any text.
    added = _ask(url, "/tokenize", {"prompt": ""})["tokens"]
    if added and ids[: len(added)] == added:
        ids = ids[len(added) :]
    body = {"tokens": ids, "skip_special_tokens": False}
    left, parts = str(_ask(url, "/detokenize", body)["text"]), []
    for content in contents:
        before, found, left = left.partition(content)
        if not found:
            raise ValueError("its chat template leaves messages out")
        parts.append(before)
    return [*parts, left]


def _ask(url: str, path: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = requests.post(url.rstrip("/") + path, json=body, timeout=TIMEOUT_S)
    if reply.status_code != 200:
        raise ValueError(f"{path} answers HTTP {reply.status_code}")
    result: dict[str, Any] = reply.json()
    return result


def _common_end(one: str, other: str) -> str:
    """The longest text that both end with."""
    num = 0
    while num < min(len(one), len(other)) and one[-num - 1] == other[-num - 1]:
        num += 1
    return one[len(one) - num :]
