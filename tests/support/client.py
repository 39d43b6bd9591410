"""A few lines around the servers' HTTP interface."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
import requests

TIMEOUT_S = 300
ANSWER_TOKENS = 160
# Prompts longer than this are prefilled in chunks by the test servers.
CHUNK = 256


@dataclass(frozen=True)
class Server:
    """One server. Greedy and answers of the task's length unless told otherwise."""

    url: str

    def post(self, path: str, body: dict[str, Any] | None = None) -> requests.Response:
        return requests.post(self.url + path, json=body, timeout=TIMEOUT_S)

    def is_alive(self) -> bool:
        """Whether the scheduler still generates; quicker than /health_generate."""
        try:
            reply = self.post("/generate", self.body([5], max_new_tokens=1))
        except requests.RequestException:
            return False
        return reply.status_code == 200

    def flush(self) -> None:
        """Empty the radix cache. SGLang refuses while requests are running, and an
        answer is here before its request has left the scheduler."""
        deadline = time.monotonic() + 30
        while (reply := self.post("/flush_cache")).status_code != 200:
            assert time.monotonic() < deadline, reply.text
            time.sleep(0.1)

    def body(
        self,
        prompt: Sequence[int] | str,
        *,
        custom: dict[str, Any] | None = None,
        top: dict[str, Any] | None = None,
        **sampling: Any,
    ) -> dict[str, Any]:
        """custom: custom_params. top: fields beside sampling_params."""
        params = {"temperature": 0, "max_new_tokens": ANSWER_TOKENS} | sampling
        if custom is not None:
            params["custom_params"] = custom
        key = "text" if isinstance(prompt, str) else "input_ids"
        return {key: prompt, "sampling_params": params} | (top or {})

    def generate(self, prompt: Sequence[int] | str, **options: Any) -> dict[str, Any]:
        reply = self.post("/generate", self.body(prompt, **options))
        assert reply.status_code == 200, reply.text[:500]
        return reply.json()

    def generate_all(
        self, prompts: Sequence[Any], concurrency: int, **options: Any
    ) -> list[dict[str, Any]]:
        """The prompts' results in order, `concurrency` of them running at a time."""
        return self.run_all([(p, options) for p in prompts], concurrency)

    def run_all(
        self, cases: Sequence[tuple[Any, dict[str, Any]]], concurrency: int
    ) -> list[dict[str, Any]]:
        """Results of (prompt, options) in order."""
        with ThreadPoolExecutor(concurrency) as threads:
            return list(threads.map(lambda c: self.generate(c[0], **c[1]), cases))

    def stream(
        self, prompt: Sequence[int] | str, **options: Any
    ) -> Iterator[dict[str, Any]]:
        return self.stream_body(self.body(prompt, **options))

    def stream_body(self, body: dict[str, Any]) -> Iterator[dict[str, Any]]:
        """Chunks of a request that is sent when the first is asked for."""
        with requests.post(
            self.url + "/generate",
            json=body | {"stream": True},
            stream=True,
            timeout=TIMEOUT_S,
        ) as reply:
            assert reply.status_code == 200, reply.text[:500]
            for line in reply.iter_lines():
                if line.startswith(b"data: {"):
                    yield json.loads(line[6:])


def chat_choice(server: Server, text: str, custom: dict[str, Any]) -> dict[str, Any]:
    """The answer to a chat of one turn, with its report."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": text}],
        "temperature": 0,
        "max_tokens": ANSWER_TOKENS,
        "return_meta_info": True,
        "custom_params": custom,
    }
    reply = server.post("/v1/chat/completions", body)
    assert reply.status_code == 200, reply.text[:500]
    (choice,) = reply.json()["choices"]
    return choice


def session(server: Server, turns: Sequence[Any], **options: Any) -> list[dict]:
    """Results of the turns of one session."""
    name = server.post("/open_session", {"capacity_of_str_len": 9999}).json()
    found: list[dict] = []
    for turn in turns:
        rid = found[-1]["meta_info"]["id"] if found else None
        top = {"session_params": {"id": name, "rid": rid}}
        found.append(server.generate(turn, top=top, **options))
    server.post("/close_session", {"session_id": name})
    return found


def report(result: dict[str, Any]) -> dict[str, Any]:
    """`meta_info["parse"]` of one request."""
    (entry,) = result["meta_info"]["parse"]
    return entry


def finish(result: dict[str, Any]) -> tuple[str, Any]:
    """Why a request ended: ("stop", what matched) or ("length", how many)."""
    reason = result["meta_info"]["finish_reason"]
    return reason["type"], reason.get("matched", reason.get("length"))


def outcome(result: dict[str, Any]) -> tuple[Any, ...]:
    """Everything of a result that two equal servers must agree on."""
    return result["output_ids"], result["text"], finish(result)


def chat_ids(tokenizer: Any, text: str) -> list[int]:
    """Token ids of one user turn under the chat template."""
    rendered = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(rendered, add_special_tokens=False)


def states_of(result) -> list[list[float]]:
    """Hidden states of a result, one list a position."""
    rows = []
    for entry in result["meta_info"]["hidden_states"]:
        rows += entry if isinstance(entry[0], list) else [entry]
    return rows


def check_hidden_states(result, expected, prompt_len: int) -> None:
    """A request that asks for hidden states gets the target's, and is told why it was
    served without a draft."""
    assert outcome(result) == outcome(expected)
    assert report(result)["fallback"] == "hidden_states"
    found, theirs = states_of(result), states_of(expected)
    assert len(found) == len(theirs) > prompt_len
    for mine, own in zip(found, theirs, strict=True):
        assert mine == pytest.approx(own, abs=1e-3)
