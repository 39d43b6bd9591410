"""Special tokens in the messages of a chat, read as plain text.

SGLang renders a chat to one text and encodes that, so a document or a tool result that
spells a special token, such as one that ends a turn, forges turns, and with them what
a judge's question seems to follow. Here each special token in a message of a user or a
tool is marked before the chat is rendered, and its place is encoded as text.

Not reached: chats that SGLang encodes without a template, and chats with images, whose
rendered text the target's processor encodes once more.
"""

from __future__ import annotations

import functools
import re
import secrets
from collections.abc import Callable, Sequence
from typing import Any

from sglang_parse.plugin.flags import config_from_server_args

ROLES = ("user", "tool", "function")
# An encoded part follows it, so that no tokenizer puts the space of a first word there.
FRONT = "\n"


class InertIds(list[int]):
    """Ids of a prompt whose text would be encoded otherwise."""

    def __add__(self, other: Any) -> InertIds:  # type: ignore[override]
        """SGLang adds the beginning of an answer."""
        return InertIds([*self, *other])


def encode_messages(
    original: Callable[..., Any],
    chat: Any,
    messages: list[dict[str, Any]],
    *,
    tools: Any,
    template_kwargs: dict[str, Any],
    encode_kwargs: dict[str, Any],
    use_cache: bool,
    add_generation_prompt: bool = True,
) -> tuple[list[int], str | None]:
    """AROUND hook on OpenAIServingChat._render_and_encode_chat_template.

    Returns the ids of the prompt and None, or what SGLang returns where no message of
    `ROLES` holds a special token.
    """
    tokenizer, mark = chat.tokenizer_manager.tokenizer, new_mark()
    marked = messages
    # A tokenizer whose ids have no text form reads messages as text by itself.
    if not chat._prompt_text_round_trip_is_lossy:
        pattern = special_tokens(tokenizer)
        marked = [marked_message(m, pattern, mark) for m in messages]
    if marked == messages or not is_on(chat):
        return original(
            chat,
            messages,
            tools=tools,
            template_kwargs=template_kwargs,
            encode_kwargs=encode_kwargs,
            use_cache=use_cache,
            add_generation_prompt=add_generation_prompt,
        )
    rendered = tokenizer.apply_chat_template(
        marked,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        return_dict=False,
        **template_kwargs,
    )
    return InertIds(encode_marked(tokenizer, rendered, mark, encode_kwargs)), None


def encode_conversation(
    original: Callable[..., Any], chat: Any, request: Any, is_multimodal: bool
) -> Any:
    """AROUND hook on OpenAIServingChat._apply_conversation_template, which renders the
    templates that SGLang has by name."""
    tokenizer, mark = chat.tokenizer_manager.tokenizer, new_mark()
    pattern = special_tokens(tokenizer)
    messages = [m.model_dump() for m in request.messages]
    marked = [marked_message(m, pattern, mark) for m in messages]
    processed = original(chat, request, is_multimodal)
    if marked != messages and not has_media(processed) and is_on(chat):
        parsed = [
            type(message)(**fields)
            for message, fields in zip(request.messages, marked, strict=True)
        ]
        request = request.model_copy(update={"messages": parsed})
        rendered = original(chat, request, is_multimodal).prompt
        processed.prompt_ids = InertIds(encode_marked(tokenizer, rendered, mark, {}))
    return processed


def has_media(processed: Any) -> bool:
    """processed: SGLang's MessageProcessingResult."""
    return bool(processed.image_data or processed.video_data or processed.audio_data)


def send_ids(
    original: Callable[..., Any], chat: Any, processed: Any, is_multimodal: bool
) -> tuple[str, Any]:
    """AROUND hook on OpenAIServingChat._engine_prompt: a target that reads images gets
    these ids too, and not their text, where the chat has no images."""
    if isinstance(processed.prompt_ids, InertIds) and not has_media(processed):
        return "input_ids", list(processed.prompt_ids)
    return original(chat, processed, is_multimodal)


def is_on(chat: Any) -> bool:
    args = chat.tokenizer_manager.server_args
    return config_from_server_args(args).inert_messages


def new_mark() -> str:
    """A text that no message holds."""
    return str(secrets.randbits(80))


@functools.lru_cache(4)  # of one tokenizer, asked for every chat
def special_tokens(tokenizer: Any) -> re.Pattern[str]:
    """Matches the text of any special token; the longest where several begin."""
    added = tokenizer.added_tokens_decoder.values()
    texts = {t.content for t in added if t.special} | set(tokenizer.all_special_tokens)
    longest_first = sorted(filter(None, texts), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def marked_message(
    message: dict[str, Any], pattern: re.Pattern[str], mark: str
) -> dict[str, Any]:
    """The message with `mark` before and after each special token of its content."""
    content = message.get("content")
    if message.get("role") not in ROLES or not content:
        return message

    def put(text: Any) -> Any:
        if not isinstance(text, str):
            return text
        # Within the token, so that no template finds it either.
        return pattern.sub(lambda m: f"{mark}{m[0][:1]}{mark}{m[0][1:]}{mark}", text)

    if isinstance(content, list):
        parts = [
            {**part, "text": put(part["text"])}
            if isinstance(part, dict) and "text" in part
            else part
            for part in content
        ]
        return {**message, "content": parts}
    return {**message, "content": put(content)}


def encode_marked(
    tokenizer: Any, rendered: str, mark: str, encode_kwargs: dict[str, Any]
) -> list[int]:
    """Ids of `rendered`: of what stands between marks as text, of the rest as SGLang
    encodes it."""
    found = re.compile(f"{mark}(.){mark}(.*?){mark}", re.DOTALL)
    ids: list[int] = []
    at = 0
    for place in found.finditer(rendered):
        ids += _encode(tokenizer, rendered[at : place.start()], ids, encode_kwargs)
        ids += encode_as_text(tokenizer, place[1] + place[2])
        at = place.end()
    # A template that cut a marked token has left a part of its marks.
    last = rendered[at:].replace(mark, "")
    return ids + _encode(tokenizer, last, ids, encode_kwargs)


def _encode(
    tokenizer: Any, text: str, before: Sequence[int], encode_kwargs: dict[str, Any]
) -> list[int]:
    if not before:
        return list(tokenizer.encode(text, **encode_kwargs)) if text else []
    return _encode_after_front(tokenizer, text)


def encode_as_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of `text` in the middle of a text, none of which is a special token's."""
    return _encode_after_front(tokenizer, text, split_special_tokens=True)


def _encode_after_front(tokenizer: Any, text: str, **kwargs: bool) -> list[int]:
    if not text:
        return []
    front = tokenizer.encode(FRONT, add_special_tokens=False)
    ids = tokenizer.encode(FRONT + text, add_special_tokens=False, **kwargs)
    if ids[: len(front)] == front:
        return list(ids[len(front) :])
    # The text begins with what joins the front in one token.
    return list(tokenizer.encode(text, add_special_tokens=False, **kwargs))
