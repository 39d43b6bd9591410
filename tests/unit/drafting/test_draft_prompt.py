"""A chat in the draft's own template."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_parse.drafting.draft_prompt import (
    PROMPT_KEY,
    carried_prompt,
    chat_of,
    render,
)
from tests.support import tokenizer_kinds as kinds

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ c.function.arguments.x }}{% endfor %}"
    "{% endfor %}{% if tools %}[{{ tools | length }}]{% endif %}"
    "{% if add_generation_prompt %}<go{{ mood }}>{% endif %}"
)
STRICT = (
    "{% if tools or messages[0].role == 'system' %}{{ raise_exception('no') }}"
    "{% endif %}" + TEMPLATE
)


def tokenizer(template: str):
    made, _ = kinds.permuted(kinds.byte_level(), seed=4)
    made.chat_template = template
    return made


def user(content):
    return {"role": "user", "content": content}


SYSTEM = {"role": "system", "content": "Be brief."}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        ({"messages": [user("hi")]}, "<user>hi<go>"),
        (
            {"messages": [SYSTEM, user([{"type": "text", "text": "hi"}])]},
            "<system>Be brief.<user>hi<go>",
        ),
        (
            {
                "messages": [user("hi"), {"role": "assistant", "content": "So "}],
                "continue_final_message": True,
            },
            "<user>hi<go>So ",
        ),
        # SGLang takes it for a user's.
        (
            {"messages": [user("a"), {"role": "assistant", "content": "b"}]},
            "<user>a<user>b<go>",
        ),
        (
            {"messages": [user("a")], "chat_template_kwargs": {"mood": "!"}},
            "<user>a<go!>",
        ),
        ({"messages": [user("a")], "tools": [{"type": "function"}]}, "<user>a[1]<go>"),
        (
            {
                "messages": [
                    user("a"),
                    {
                        "role": "assistant",
                        "content": None,
                        "tool_calls": [{"function": {"arguments": '{"x": 7}'}}],
                    },
                    {"role": "tool", "content": "8"},
                ]
            },
            "<user>a<assistant>7<tool>8<go>",
        ),
        # What a client may not say otherwise than we do.
        (
            {
                "messages": [user("a")],
                "chat_template_kwargs": {"tokenize": True, "messages": []},
            },
            "<user>a<go>",
        ),
        # A template is a program that may never end.
        (
            {"messages": [user("a")], "chat_template_kwargs": {"chat_template": "x"}},
            "<user>a<go>",
        ),
    ],
)
def test_a_chat_is_written_as_sglang_reads_it(body, expected):
    """Red if the draft reads other words than the target."""
    assert render(tokenizer(TEMPLATE), chat_of(body)) == expected


def test_a_template_that_refuses_is_asked_for_less():
    """Red if a system prompt or tools keep the draft from its own template, or an
    error of a template reaches the client."""
    strict = tokenizer(STRICT)
    chat = chat_of({"messages": [SYSTEM, user("hi")], "tools": [{"type": "function"}]})
    assert render(strict, chat) == "<user>Be brief.\n\nhi<go>"
    assert render(tokenizer("{{ raise_exception('no') }}"), chat) is None
    assert render(tokenizer("{{ nothing.at.all }}"), chat) is None


@pytest.mark.parametrize(
    "messages",
    [
        None,
        [],
        "hi",
        [5],
        [{"content": "x"}],
        [user(5)],
        [user([{"type": "image_url", "image_url": {"url": "x"}}])],
        [user([{"type": "text"}])],
    ],
)
def test_what_is_no_chat_in_text_is_left_to_sglang(messages):
    """Red if a body that SGLang refuses, or one with images, ends in our error."""
    assert chat_of({"messages": messages}) is None


def test_fields_that_sglang_drops_reach_no_template():
    """Red if a client has a draft read what this server does not."""
    odd = {"image_url": {"url": "http://10.0.0.1"}, "audio": {"id": "x"}, "name": "n"}
    chat = chat_of({"messages": [{**user("hi"), **odd}]})
    assert chat["messages"] == [{**user("hi"), "name": "n"}]


def request(custom, session=None):
    return SimpleNamespace(
        sampling_params=SimpleNamespace(custom_params=custom), session=session
    )


def test_what_came_along_is_read():
    """Red if a request without a chat stops the scheduler, or one that continues a
    session is drafted for from its last turn alone."""
    assert carried_prompt(request({PROMPT_KEY: "go"})) == "go"
    for custom in (None, [], {}, {"x": "x"}):
        assert carried_prompt(request(custom)) is None
    assert carried_prompt(request({PROMPT_KEY: "go"}, session=object())) is None
