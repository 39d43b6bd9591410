"""The load client: streaming HTTP requests at a fixed concurrency."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import aiohttp

from sglang_parse.demo.figures import RequestResult
from sglang_parse.embedded.task import Problem, check_answer

REQUEST_TIMEOUT_S = 600.0
# The longest right answer takes some 150 tokens; a broken model must not run on.
MAX_NEW_TOKENS = 320
# aiohttp refuses lines longer than twice this; a report of segments is one line.
READ_BYTES = 1 << 20
_DATA = b"data: "
_DONE = b"data: [DONE]"


class LoadError(RuntimeError):
    """A request that failed; the message says why."""


@dataclass(frozen=True)
class Prompt:
    """A chat prompt as token ids, and its problem; None accepts any answer."""

    problem: Problem | None
    input_ids: tuple[int, ...]
    max_new_tokens: int = MAX_NEW_TOKENS


@dataclass(frozen=True)
class AnswerStream:
    """A finished stream: its last `data:` line, and seconds to the first and last."""

    last: bytes
    ttft_s: float
    latency_s: float


@dataclass(frozen=True)
class Measurement:
    """results: in the order of the prompts. wall_s: first request to last answer."""

    results: tuple[RequestResult, ...]
    wall_s: float


def load_tokenizer(path: str) -> Any:
    """The tokenizer of a model, from a folder or by its Hugging Face name. Raises
    ValueError where neither is at hand."""
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(path)
    except OSError as error:
        raise ValueError(
            f"There is no tokenizer at {path!r} here, where the server has it; start "
            "the server with the whole path, or this command in the server's folder "
            f"({type(error).__name__})."
        ) from error


def encode_chat(
    tokenizer: Any, text: str, options: Mapping[str, Any] | None = None
) -> tuple[int, ...]:
    """Token ids of one user turn. options: of the chat template."""
    chat = tokenizer.apply_chat_template(
        [{"role": "user", "content": text}],
        tokenize=False,
        add_generation_prompt=True,
        **(options or {}),
    )
    return tuple(tokenizer.encode(chat, add_special_tokens=False))


def encode_prompts(tokenizer: Any, problems: Sequence[Problem]) -> list[Prompt]:
    """Each problem as one user turn."""
    return [Prompt(p, encode_chat(tokenizer, p.prompt)) for p in problems]


def measure(
    url: str,
    prompts: Sequence[Prompt],
    *,
    concurrency: int,
    warm_up: Sequence[Prompt] = (),
    custom_params: Mapping[str, Any] | None = None,
    on_answer: Callable[[], object] = lambda: None,
) -> Measurement:
    """Warm up, flush the server's cache, then send all prompts and time them.

    custom_params: of every request, e.g. {"parse_mode": "exact"}. Raises LoadError
    with the server's answer if a request fails.
    """

    async def run() -> Measurement:
        await _send_all(url, warm_up, concurrency, custom_params)
        await flush_cache(url)
        start = time.perf_counter()
        results = await _send_all(url, prompts, concurrency, custom_params, on_answer)
        return Measurement(tuple(results), time.perf_counter() - start)

    return asyncio.run(run())


def ask_with_report(url: str, prompt: Prompt) -> RequestResult:
    """One answer whose report lists its segments."""
    return asyncio.run(_send_all(url, [prompt], 1, {"parse_report": True}))[0]


async def flush_cache(url: str) -> None:
    """Empty the server's radix cache. Raises LoadError if that fails."""
    try:
        async with (
            aiohttp.ClientSession() as session,
            session.post(url + "/flush_cache", params={"timeout": "30"}) as response,
        ):
            if response.status != 200:
                text = (await response.text())[:200].strip()
                raise LoadError(f"{url}/flush_cache answered {response.status}: {text}")
    except (aiohttp.ClientError, TimeoutError) as e:
        raise LoadError(f"{url}/flush_cache failed: {e or type(e).__name__}") from e


async def _send_all(
    url: str,
    prompts: Sequence[Prompt],
    concurrency: int,
    custom_params: Mapping[str, Any] | None = None,
    on_answer: Callable[[], object] = lambda: None,
) -> list[RequestResult]:
    """Send all prompts with at most `concurrency` requests in flight."""
    gate = asyncio.Semaphore(concurrency)
    async with open_session(concurrency) as session:

        async def one(prompt: Prompt) -> RequestResult:
            async with gate:
                result = await _send(session, url, prompt, custom_params)
            on_answer()
            return result

        return list(await asyncio.gather(*(one(p) for p in prompts)))


async def _send(
    session: aiohttp.ClientSession,
    url: str,
    prompt: Prompt,
    custom_params: Mapping[str, Any] | None,
) -> RequestResult:
    sampling: dict[str, Any] = {"temperature": 0}
    sampling["max_new_tokens"] = prompt.max_new_tokens
    if custom_params:
        sampling["custom_params"] = dict(custom_params)
    body = {
        "input_ids": list(prompt.input_ids),
        "sampling_params": sampling,
        "stream": True,
    }
    stream = await post_stream(session, url, body)
    return read_result(
        stream.last, prompt.problem, latency_s=stream.latency_s, ttft_s=stream.ttft_s
    )


def open_session(
    concurrency: int,
    timeout_s: float = REQUEST_TIMEOUT_S,
    headers: Mapping[str, str] | None = None,
) -> aiohttp.ClientSession:
    """A client with up to `concurrency` connections; call it inside an event loop.

    Each request has its own connection, because a request that is sent on a connection
    that the server is closing would be lost.
    """
    return aiohttp.ClientSession(
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        connector=aiohttp.TCPConnector(limit=concurrency, force_close=True),
        read_bufsize=READ_BYTES,
        headers=headers,
    )


async def post_stream(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any]
) -> AnswerStream:
    """POST a streaming `/generate`. Raises LoadError if it fails."""
    start = time.perf_counter()
    ttft, last = 0.0, b""
    try:
        async with session.post(url + "/generate", json=body) as response:
            if response.status != 200:
                text = (await response.text())[:200].strip()
                raise LoadError(f"{url}/generate answered {response.status}: {text}")
            async for line in response.content:
                if not line.startswith(_DATA) or line.strip() == _DONE:
                    continue
                ttft = ttft or time.perf_counter() - start
                last = line
    except (aiohttp.ClientError, TimeoutError) as e:
        raise LoadError(f"{url}/generate failed: {e or type(e).__name__}") from e
    return AnswerStream(last, ttft, time.perf_counter() - start)


def read_chunk(line: bytes) -> dict[str, Any]:
    """A `data:` line of a stream; the last one holds the whole answer.

    Raises LoadError if it is empty or tells of an error or an aborted request.
    """
    if not line:
        raise LoadError("/generate sent no output.")
    chunk: dict[str, Any] = json.loads(line.removeprefix(_DATA))
    if "error" in chunk:
        raise LoadError(f"/generate failed: {str(chunk['error'])[:200]}")
    # In a stream SGLang reports an aborted request as a finished one.
    reason = chunk.get("meta_info", {}).get("finish_reason") or {}
    if reason.get("type") == "abort":
        raise LoadError(f"/generate was aborted: {str(reason.get('message'))[:200]}")
    return chunk


def read_result(
    line: bytes, problem: Problem | None, *, latency_s: float, ttft_s: float
) -> RequestResult:
    """The checked answer of a stream's last line. Raises LoadError as read_chunk."""
    chunk = read_chunk(line)
    meta = chunk["meta_info"]
    reports = meta.get("parse") or [None]
    return RequestResult(
        text=chunk["text"],
        token_ids=tuple(chunk["output_ids"]),
        num_tokens=meta["completion_tokens"],
        correct=problem is None or check_answer(problem, chunk["text"]),
        latency_s=latency_s,
        ttft_s=ttft_s,
        report=reports[0],
    )
