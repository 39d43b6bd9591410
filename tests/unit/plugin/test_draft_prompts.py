"""What the HTTP process sends along for those who draft."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

from benchmarks.models import OTHER_DRAFT_PATH
from sglang_parse.drafting.draft_prompt import PROMPT_KEY
from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from sglang_parse.options.server import ParseConfig
from sglang_parse.plugin.draft_prompts import (
    draft_with_template,
    prompt_entries,
    set_entries,
)
from sglang_parse.plugin.openai import CHAT, ParseEndpoints
from sglang_parse.plugin.request_hooks import follow_request
from tests.support.fake_manager import FakeManager

MESSAGES = [{"role": "user", "content": "hi"}]


class Template:
    """A tokenizer as far as it writes chats."""

    def apply_chat_template(self, messages, **options):
        return "|".join(m["content"] for m in messages)


def entries(tokenizer, **body):
    return prompt_entries(tokenizer, {"messages": MESSAGES} | body)


def test_only_what_is_read_is_sent():
    """Red if each chat travels twice on a server that does not need it."""
    assert entries(None) == {}
    assert entries(Template()) == {PROMPT_KEY: "hi"}
    off = {"parse_mode": "off"}
    assert entries(Template(), custom_params=off) == {}


def test_what_sglang_refuses_is_left_to_it():
    """Red if a body that cannot be read ends in our error."""
    assert entries(Template(), messages=7) == {}
    assert entries(Template(), custom_params=[1]) == {PROMPT_KEY: "hi"}
    for given in (None, 5, [None, 5], {"custom_params": 5}, {"custom_params": [1]}):
        obj = SimpleNamespace(sampling_params=given)
        set_entries(obj, {PROMPT_KEY: "hi"})
        assert obj.sampling_params == given
    set_entries(SimpleNamespace(), {})


MANAGER = FakeManager()
FORGED = {PROMPT_KEY: "forged", "x": 1}


def test_no_client_writes_our_entries():
    """Red if what a client puts under an internal key reaches a drafter: in a chat, in
    a completion, in one of a batch, or beside an entry of ours."""
    seen = []

    async def app(scope, receive, send):
        custom = json.loads((await receive())["body"])["custom_params"]
        obj = SimpleNamespace(sampling_params={"custom_params": custom})
        follow_request(None, MANAGER, obj)
        seen.append(obj.sampling_params["custom_params"])

    layer = ParseEndpoints(app, ParseConfig(), Template())
    for path in (CHAT, "/v1/completions", "/invocations"):
        raw = json.dumps({"messages": MESSAGES, "custom_params": FORGED}).encode()

        async def receive(raw=raw):
            return {"type": "http.request", "body": raw}

        scope = {"type": "http", "path": path, "headers": []}
        asyncio.run(layer(scope, receive, None))
    chat, completion, alias = seen
    assert chat[PROMPT_KEY] == "hi"
    assert completion == {"x": 1} and alias == chat
    batch = [{"custom_params": dict(FORGED)}, {}]
    follow_request(None, MANAGER, SimpleNamespace(sampling_params=batch))
    assert batch == [{"custom_params": {"x": 1}}, {}]


def test_a_template_like_the_targets_is_not_written_twice():
    """Red if a server whose draft reads the target's template renders each chat again,
    or one whose draft has another template does not."""
    args = SimpleNamespace(
        model_path=str(TARGET_PATH), tokenizer_path=None, revision=None,
        tokenizer_mode="auto", trust_remote_code=False, chat_template=None,
        speculative_draft_model_path=str(OTHER_DRAFT_PATH),
        speculative_draft_model_revision=None,
    )  # fmt: skip
    assert draft_with_template(args) is None
    args.chat_template = "other.jinja"
    assert draft_with_template(args) is not None
    args.speculative_draft_model_path = str(DRAFT_PATH)
    assert draft_with_template(args) is None
    args.speculative_draft_model_path = None
    assert draft_with_template(args) is None
