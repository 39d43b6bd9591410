"""What the HTTP process sends along for those who draft."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

import pytest

from sglang_parse.drafting.draft_prompt import CHAT_KEY, PROMPT_KEY
from sglang_parse.embedded import DRAFT_PATH, OTHER_DRAFT_PATH, TARGET_PATH
from sglang_parse.integration import draft_prompts
from sglang_parse.integration.draft_prompts import DraftPrompts
from sglang_parse.integration.openai import CHAT, ParseEndpoints

MESSAGES = [{"role": "user", "content": "hi"}]


class Template:
    """A tokenizer as far as it writes chats."""

    def apply_chat_template(self, messages, **options):
        return "|".join(m["content"] for m in messages)


def added(prompts: DraftPrompts, **body):
    body = {"messages": MESSAGES} | body
    prompts.add_to(body)
    return body


def test_only_what_is_read_is_sent():
    """Red if each chat travels twice on a server that does not need it, or options of
    the request are lost."""
    assert added(DraftPrompts()) == {"messages": MESSAGES}
    body = added(DraftPrompts(Template()), custom_params={"parse_threshold": 0.5})
    assert body["custom_params"] == {"parse_threshold": 0.5, PROMPT_KEY: "hi"}
    body = added(DraftPrompts(sends_chats=True))
    assert body["custom_params"][CHAT_KEY]["messages"] == MESSAGES
    off = {"parse_mode": "off"}
    assert added(DraftPrompts(Template()), custom_params=off)["custom_params"] == off


@pytest.mark.parametrize("custom", [5, "x", [1]])
def test_what_sglang_refuses_is_left_to_it(custom):
    """Red if a body that cannot be read ends in our error."""
    assert (
        added(DraftPrompts(Template()), custom_params=custom)["custom_params"] == custom
    )
    assert "custom_params" not in added(DraftPrompts(Template()), messages=7)


def test_chats_alone_get_a_prompt():
    """Red if the layer forgets the prompt, or writes one for a text completion."""
    seen = []

    async def app(scope, receive, send):
        seen.append(json.loads((await receive())["body"]))

    layer = ParseEndpoints(app, prompts=DraftPrompts(Template()))
    for path in (CHAT, "/v1/completions"):
        raw = json.dumps({"messages": MESSAGES}).encode()

        async def receive(raw=raw):
            return {"type": "http.request", "body": raw}

        scope = {"type": "http", "path": path, "headers": []}
        asyncio.run(layer(scope, receive, None))
    assert seen[0]["custom_params"] == {PROMPT_KEY: "hi"}
    assert seen[1] == {"messages": MESSAGES}


def test_a_template_like_the_targets_is_not_written_twice(monkeypatch, tmp_path):
    """Red if a server whose draft reads the target's template renders each chat again,
    or one whose draft has another template does not."""
    monkeypatch.setattr(
        draft_prompts,
        "config_from_server_args",
        lambda args: SimpleNamespace(draft_url=args.url),
    )
    args = SimpleNamespace(
        model_path=str(TARGET_PATH), tokenizer_path=None, revision=None,
        tokenizer_mode="auto", trust_remote_code=False, chat_template=None, url="",
        speculative_draft_model_path=str(OTHER_DRAFT_PATH),
        speculative_draft_model_revision=None,
    )  # fmt: skip
    assert DraftPrompts.of(args).tokenizer is None
    args.chat_template = "other.jinja"
    assert DraftPrompts.of(args).tokenizer is not None
    args.speculative_draft_model_path = str(DRAFT_PATH)
    assert DraftPrompts.of(args).tokenizer is None
    args.speculative_draft_model_path, args.url = None, "http://x/v1"
    prompts = DraftPrompts.of(args)
    assert prompts.sends_chats and prompts.tokenizer is None
