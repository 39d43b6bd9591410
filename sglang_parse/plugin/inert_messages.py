"""Special tokens in the messages of a chat, read as plain text.

SGLang renders a chat to one text and encodes that, so a document or a tool result that
spells a special token, such as one that ends a turn, forges turns, and with them what
a judge's question seems to follow. Here each special token in a message of a user or a
tool, in the schema of a tool or in a document is marked before the chat is rendered,
and what was rendered is encoded in the parts between marks.

Not reached: chats that SGLang encodes without a template, and chats with images, whose
rendered text the target's processor encodes once more.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable
from functools import partial
from typing import Any

from sglang_parse.judging.special_tokens import Cutter, encode_parts
from sglang_parse.plugin.flags import config_from_server_args

ROLES = ("user", "tool", "function")
TEMPLATE = "chat_template"


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

    Returns the ids of the prompt and None, or what SGLang returns where no text of
    others holds a special token.
    """
    manager = chat.tokenizer_manager
    given, cutter = (messages, tools, template_kwargs), _cutter(manager)
    marked = given
    # A tokenizer whose ids have no text form reads messages as text by itself.
    if not chat._prompt_text_round_trip_is_lossy:
        own = {k: v for k, v in template_kwargs.items() if k == TEMPLATE}
        marked = (
            marked_messages(messages, cutter),
            cutter.cut_all(tools),
            cutter.cut_all(template_kwargs) | own,
        )
    if marked == given or not _is_on(manager):
        return original(
            chat,
            messages,
            tools=tools,
            template_kwargs=template_kwargs,
            encode_kwargs=encode_kwargs,
            use_cache=use_cache,
            add_generation_prompt=add_generation_prompt,
        )
    messages, tools, template_kwargs = marked
    rendered = manager.tokenizer.apply_chat_template(
        messages,
        tokenize=False,
        add_generation_prompt=add_generation_prompt,
        tools=tools,
        return_dict=False,
        **template_kwargs,
    )
    return _encode(manager, rendered, cutter, encode_kwargs), None


def encode_conversation(
    original: Callable[..., Any], chat: Any, request: Any, is_multimodal: bool
) -> Any:
    """AROUND hook on OpenAIServingChat._apply_conversation_template, which renders the
    templates that SGLang has by name."""
    processed, manager = original(chat, request, is_multimodal), chat.tokenizer_manager
    cutter = _cutter(manager)
    messages = [m.model_dump() for m in request.messages]
    marked = marked_messages(messages, cutter)
    if marked != messages and not has_media(processed) and _is_on(manager):
        parsed = [
            type(message)(**fields)
            for message, fields in zip(request.messages, marked, strict=True)
        ]
        request = request.model_copy(update={"messages": parsed})
        rendered = original(chat, request, is_multimodal).prompt
        processed.prompt_ids = _encode(manager, rendered, cutter, {})
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


def encode_ollama(original: Callable[..., Any], serving: Any, *args: Any) -> Any:
    """AROUND hook on OllamaServing.handle_chat, which has the tokenizer render and
    encode the chat."""
    manager = serving.tokenizer_manager
    render = partial(_render_and_encode, manager)
    tokenizer = _Instead(manager.tokenizer, apply_chat_template=render)
    manager = _Instead(manager, tokenizer=tokenizer)
    return original(_Instead(serving, tokenizer_manager=manager), *args)


def _render_and_encode(
    manager: Any, messages: list[dict[str, Any]], **options: Any
) -> list[int]:
    """As `apply_chat_template` of the tokenizer."""
    tokenizer, cutter = manager.tokenizer, _cutter(manager)
    marked = marked_messages(messages, cutter)
    if marked == messages or not _is_on(manager):
        ids: list[int] = tokenizer.apply_chat_template(messages, **options)
        return ids
    rendered = tokenizer.apply_chat_template(marked, **{**options, "tokenize": False})
    return list(_encode(manager, rendered, cutter, {"add_special_tokens": False}))


class _Instead:
    """An object with some attributes of its own, and the others of another object."""

    def __init__(self, other: Any, **own: Any) -> None:
        self.__dict__.update(own, _other=other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._other, name)


def _cutter(manager: Any) -> Cutter:
    return Cutter(manager.tokenizer, str(secrets.randbits(80)))


def _is_on(manager: Any) -> bool:
    return config_from_server_args(manager.server_args).inert_messages


def _encode(
    manager: Any, rendered: str, cutter: Cutter, encode_kwargs: dict[str, Any]
) -> InertIds:
    parts = rendered.split(cutter.mark)
    return InertIds(encode_parts(manager.tokenizer, parts, **encode_kwargs))


def marked_messages(
    messages: list[dict[str, Any]], cutter: Cutter
) -> list[dict[str, Any]]:
    """The messages with a mark inside each special token of others' texts."""
    return [
        _marked(message, cutter) if message.get("role") in ROLES else message
        for message in messages
    ]


def _marked(message: dict[str, Any], cutter: Cutter) -> dict[str, Any]:
    marked: dict[str, Any] = cutter.cut_all(message)
    if isinstance(content := marked.get("content"), list):
        # Templates write the parts of a message side by side.
        for part, behind in zip(content, content[1:], strict=False):
            text = part.get("text") if isinstance(part, dict) else None
            if isinstance(text, str) and behind and cutter.may_go_on(text):
                part["text"] = text + cutter.mark
    return marked
