"""A chat as a draft in text reads it: its prompt in the draft's own template.

The HTTP process, which has the messages, puts it into `custom_params`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

#: Entries of `custom_params` that begin so are ours; a client's are dropped.
INTERNAL = "sglang_parse_"
#: The prompt in the draft's template.
PROMPT_KEY = f"{INTERNAL}draft_prompt"

#: Fields of a message that SGLang reads too (entrypoints/openai/protocol.py).
READ = ("role", "name", "reasoning_content", "tool_calls", "tool_call_id", "tools")


def carried_prompt(req: Any) -> str | None:
    """What the HTTP process sent with a request of SGLang's; None without, and for one
    that continues a session, whose prompt is not this chat alone."""
    params = req.sampling_params.custom_params
    if not isinstance(params, Mapping) or getattr(req, "session", None) is not None:
        return None
    return params.get(PROMPT_KEY)


def chat_of(body: Mapping[str, Any]) -> dict[str, Any] | None:
    """What a body of the chat endpoint asks, in text alone; None where it has images or
    cannot be read, which SGLang says itself.

    As SGLang reads it: parts of a text are joined, an assistant's last turn is a user's
    unless it is to be continued.
    """
    messages = body.get("messages")
    if not isinstance(messages, list) or not messages:
        return None
    found = [_plain(message) for message in messages]
    plain = [message for message in found if message is not None]
    if len(plain) < len(found):
        return None
    is_continued = body.get("continue_final_message") is True
    if plain[-1]["role"] == "assistant" and not is_continued:
        plain[-1] = {"role": "user", "content": plain[-1]["content"]}
    options = body.get("chat_template_kwargs")
    options = dict(options) if isinstance(options, dict) else {}
    if body.get("reasoning_effort") is not None:
        options.setdefault("reasoning_effort", body["reasoning_effort"])
    tools = body.get("tools") if body.get("tool_choice") != "none" else None
    return {
        "messages": plain,
        "tools": tools if isinstance(tools, list) and tools else None,
        "options": options,
        "is_continued": is_continued and plain[-1]["role"] == "assistant",
    }


def _plain(message: Any) -> dict[str, Any] | None:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        return None
    content = message.get("content")
    if isinstance(content, list):
        texts = [part.get("text") for part in content if _is_text(part)]
        if len(texts) < len(content):
            return None
        content = " ".join(map(str, texts))
    if content is not None and not isinstance(content, str):
        return None
    known = {key: message[key] for key in READ if key in message}
    return {**known, "content": content or ""}


def _is_text(part: Any) -> bool:
    is_part = isinstance(part, dict) and part.get("type") == "text"
    return is_part and isinstance(part.get("text"), str)


def render(tokenizer: Any, chat: Mapping[str, Any]) -> str | None:
    """The chat in a tokenizer's own template, up to where the answer begins.

    None where the template cannot say it, even without tools and with the system's
    words in the first turn.
    """
    messages, prefix = list(chat["messages"]), ""
    if chat["is_continued"]:
        prefix = messages.pop()["content"]
    messages = [_with_read_arguments(message) for message in messages]
    ways: list[tuple[list[dict[str, Any]], Any]] = [(messages, chat["tools"])]
    if chat["tools"]:
        ways.append((messages, None))
    if len(messages) > 1 and messages[0]["role"] == "system":
        first = {**messages[1]}
        first["content"] = f"{messages[0]['content']}\n\n{first['content']}"
        ways.append(([first, *messages[2:]], None))
    # Of the caller's, they would change what is rendered, and not how; a template is a
    # program that may never end.
    ours = (
        *("messages", "conversation", "tools", "tokenize", "add_generation_prompt"),
        "chat_template",
    )
    options = {k: v for k, v in chat["options"].items() if k not in ours}
    for turns, tools in ways:
        try:
            text = tokenizer.apply_chat_template(
                turns,
                tools=tools,
                tokenize=False,
                add_generation_prompt=True,
                **options,
            )
        except Exception:  # noqa: S112  # templates raise whatever they like
            continue
        if isinstance(text, str) and text:
            return text + prefix
    return None


def _with_read_arguments(message: dict[str, Any]) -> dict[str, Any]:
    """Templates read the arguments of a call as an object, the API sends them as
    text."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [_read_call(call) for call in calls]}


def _read_call(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    arguments = function.get("arguments") if isinstance(function, dict) else None
    if not isinstance(function, dict) or not isinstance(arguments, str):
        return call
    try:
        return {**call, "function": {**function, "arguments": json.loads(arguments)}}
    except ValueError:
        return call
