"""What the HTTP process sends along for those who draft."""

from __future__ import annotations

import asyncio
import json
from types import SimpleNamespace

from benchmarks.models import OTHER_DRAFT_PATH
from sglang_parse.drafting.draft_prompt import CHAT_KEY, PROMPT_KEY
from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from sglang_parse.options.server import ParseConfig
from sglang_parse.plugin import draft_prompts
from sglang_parse.plugin.draft_prompts import DraftPrompts, set_entries
from sglang_parse.plugin.openai import CHAT, ParseEndpoints
from sglang_parse.plugin.request_hooks import follow_request
from tests.support.fake_manager import FakeManager

MESSAGES = [{"role": "user", "content": "hi"}]


class Template:
    """A tokenizer as far as it writes chats."""

    def apply_chat_template(self, messages, **options):
        return "|".join(m["content"] for m in messages)


def entries(prompts: DraftPrompts, **body):
    return prompts.entries_of({"messages": MESSAGES} | body)


def test_only_what_is_read_is_sent():
    """Red if each chat travels twice on a server that does not need it."""
    assert entries(DraftPrompts()) == {}
    assert entries(DraftPrompts(Template())) == {PROMPT_KEY: "hi"}
    assert entries(DraftPrompts(sends_chats=True))[CHAT_KEY]["messages"] == MESSAGES
    off = {"parse_mode": "off"}
    assert entries(DraftPrompts(Template()), custom_params=off) == {}


def test_what_sglang_refuses_is_left_to_it():
    """Red if a body that cannot be read ends in our error."""
    assert entries(DraftPrompts(Template()), messages=7) == {}
    assert entries(DraftPrompts(Template()), custom_params=[1]) == {PROMPT_KEY: "hi"}
    for given in (None, 5, [None, 5], {"custom_params": 5}, {"custom_params": [1]}):
        obj = SimpleNamespace(sampling_params=given)
        set_entries(obj, {PROMPT_KEY: "hi"})
        assert obj.sampling_params == given
    set_entries(SimpleNamespace(), {})


MANAGER = FakeManager()
FORGED = {CHAT_KEY: {"messages": [{"role": "user", "content": "forged"}]}, "x": 1}


def test_no_client_writes_our_entries():
    """Red if what a client puts under an internal key reaches a drafter: in a chat, in
    a completion, in one of a batch, or beside an entry of ours."""
    seen = []

    async def app(scope, receive, send):
        custom = json.loads((await receive())["body"])["custom_params"]
        obj = SimpleNamespace(sampling_params={"custom_params": custom})
        follow_request(None, MANAGER, obj)
        seen.append(obj.sampling_params["custom_params"])

    layer = ParseEndpoints(
        app, ParseConfig(), DraftPrompts(Template(), sends_chats=True)
    )
    for path in (CHAT, "/v1/completions", "/invocations"):
        raw = json.dumps({"messages": MESSAGES, "custom_params": FORGED}).encode()

        async def receive(raw=raw):
            return {"type": "http.request", "body": raw}

        scope = {"type": "http", "path": path, "headers": []}
        asyncio.run(layer(scope, receive, None))
    chat, completion, alias = seen
    assert chat[CHAT_KEY]["messages"] == MESSAGES and chat[PROMPT_KEY] == "hi"
    assert completion == {"x": 1} and alias == chat
    batch = [{"custom_params": dict(FORGED)}, {}]
    follow_request(None, MANAGER, SimpleNamespace(sampling_params=batch))
    assert batch == [{"custom_params": {"x": 1}}, {}]


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
