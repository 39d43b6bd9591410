"""The client's side of an arm: how one prompt becomes one answer.

`plain` is one request. `cascade` and `sequential` are what a client of two servers does
without PARSE's prefix verification. Both judge with PARSE's own question and verdict
tokens, so that arms differ in when they ask, not in what.
"""

from __future__ import annotations

import math
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from sglang_parse.demo.load import post_stream, read_chunk

# Steps of a sequential answer without an end, which must not run on.
MAX_STEP_TOKENS = 512
# One boundary, at the end of a draft that has ended.
WHOLE_DRAFT = "fixed:1000000"


@dataclass(frozen=True)
class Round:
    """Verdicts given together. at: output tokens before. draft: the judged tokens.
    ends, scores: offsets into it and P(yes) there. num_kept: tokens of it kept."""

    at: int
    draft: tuple[int, ...]
    ends: tuple[int, ...]
    scores: tuple[float, ...]
    num_kept: int


@dataclass(frozen=True)
class Answer:
    """One answered turn. Seconds from sending it; ttft_s to the first token that is
    known to stay. counters: as `meta_info["parse"]`, {} where nothing speculates;
    target_passes: decode passes of the target."""

    text: str
    token_ids: tuple[int, ...]
    num_tokens: int
    ttft_s: float
    latency_s: float
    target_passes: int
    counters: Mapping[str, int] = field(default_factory=dict)
    rounds: tuple[Round, ...] = ()


@dataclass(frozen=True)
class Client:
    """What a procedure asks with. urls: by role. suffix, verdict_ids: the judge's.
    decode: token ids -> text without special tokens."""

    session: aiohttp.ClientSession
    urls: Mapping[str, str]
    options: Mapping[str, Any]
    temperature: float
    max_new_tokens: int
    threshold: float
    step_stop: str
    suffix: tuple[int, ...]
    verdict_ids: tuple[tuple[int, int], ...]
    decode: Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Reply:
    """One `/generate`. ended: by the end of the answer, not a stop string or length."""

    text: str
    token_ids: tuple[int, ...]
    num_tokens: int
    ended: bool
    meta: Mapping[str, Any]
    ttft_s: float
    latency_s: float


async def generate(
    client: Client,
    role: str,
    input_ids: Sequence[int],
    *,
    custom: Mapping[str, Any] | None = None,
    top: Mapping[str, Any] | None = None,
    **sampling: Any,
) -> Reply:
    """One request. custom: custom_params. top: fields beside sampling_params."""
    params: dict[str, Any] = {
        "temperature": client.temperature,
        "max_new_tokens": client.max_new_tokens,
        **sampling,
    }
    if custom:
        params["custom_params"] = dict(custom)
    body = {"input_ids": list(input_ids), "sampling_params": params, "stream": True}
    stream = await post_stream(
        client.session, client.urls[role], body | dict(top or {})
    )
    chunk = read_chunk(stream.last)
    meta, ids = chunk["meta_info"], tuple(chunk["output_ids"])
    matched = (meta.get("finish_reason") or {}).get("matched")
    return Reply(
        text=chunk["text"],
        token_ids=ids,
        num_tokens=meta["completion_tokens"],
        ended=isinstance(matched, int),
        meta=meta,
        ttft_s=stream.ttft_s,
        latency_s=stream.latency_s,
    )


def visible(reply: Reply) -> tuple[int, ...]:
    """Token ids without the end token that finished the reply."""
    ids = reply.token_ids
    matched = (reply.meta.get("finish_reason") or {}).get("matched")
    return ids[:-1] if ids and ids[-1] == matched else ids


async def plain(client: Client, input_ids: Sequence[int]) -> Answer:
    """One request; a PARSE server's report comes with it."""
    reply = await generate(client, "main", input_ids, custom=client.options)
    reports = reply.meta.get("parse") or [None]
    return _answer(reply, reports[0])


def _answer(reply: Reply, report: Mapping[str, Any] | None) -> Answer:
    """report: of PARSE; SGLang's own algorithms count their passes in the meta info."""
    counters = dict(report or {})
    rounds = read_rounds(counters.pop("segments", ()))
    plain_passes = max(0, reply.num_tokens - 1)
    passes = reply.meta.get("spec_verify_ct") or plain_passes
    if report is not None:
        passes = report["target_passes"]
    return Answer(
        text=reply.text,
        token_ids=reply.token_ids,
        num_tokens=reply.num_tokens,
        ttft_s=reply.ttft_s,
        latency_s=reply.latency_s,
        target_passes=int(passes),
        counters={k: v for k, v in counters.items() if isinstance(v, int)},
        rounds=rounds,
    )


def read_rounds(segments: Sequence[Mapping[str, Any]]) -> tuple[Round, ...]:
    """The verdicts of a report's segments, round by round (each ends with a token of
    the target's own). Draft tokens that a recovering target denied stand before the
    verdicts of their round: they are no part of the answer, but were judged with it."""
    rounds = []
    at, draft, ends, scores, kept = 0, list[int](), list[int](), list[float](), 0
    for segment in segments:
        is_judged = segment["score"] is not None
        if is_judged or segment["outcome"] == "rejected":
            at = at if draft else segment["start"]
            draft += segment["token_ids"]
        if is_judged:
            ends.append(len(draft))
            scores.append(segment["score"])
            kept = len(draft) if segment["outcome"] == "kept" else kept
        elif segment["origin"] == "target":
            if ends:
                rounds.append(Round(at, tuple(draft), tuple(ends), tuple(scores), kept))
            at, draft, ends, scores, kept = 0, [], [], [], 0
    return tuple(rounds)


async def cascade(client: Client, input_ids: Sequence[int]) -> Answer:
    """The whole draft, judged once at its end: kept, or regenerated by the target.

    Draft and verdict are one request to a PARSE server, so no time is lost between
    them; the stock target server regenerates. Nothing of the draft is shown before the
    verdict.
    """
    start = time.perf_counter()
    custom = {
        "parse_segmenter": WHOLE_DRAFT,
        "parse_threshold": 0.0,  # the verdict is ours
        "parse_window": 0,
        "parse_exact_tail": False,
        "parse_report": True,
    }
    draft = await generate(client, "judge", input_ids, custom=custom)
    judged = _answer(draft, draft.meta["parse"][0])
    scores = [score for r in judged.rounds for score in r.scores]
    is_kept = draft.ended and bool(scores) and min(scores) >= client.threshold
    if is_kept:
        latency = time.perf_counter() - start
        return Answer(
            text=draft.text,
            token_ids=draft.token_ids,
            num_tokens=draft.num_tokens,
            ttft_s=latency,
            latency_s=latency,
            target_passes=judged.target_passes,
            counters=judged.counters,
            rounds=judged.rounds,
        )
    waited = time.perf_counter() - start
    final = await generate(client, "target", input_ids)
    nothing = {"kept_tokens": 0, "matched_tokens": 0, "kept_segments": 0}
    return Answer(
        text=final.text,
        token_ids=final.token_ids,
        num_tokens=final.num_tokens,
        ttft_s=waited + final.ttft_s,
        latency_s=time.perf_counter() - start,
        target_passes=judged.target_passes + max(0, final.num_tokens - 1),
        counters={
            **judged.counters,
            **nothing,
            "written_tokens": final.num_tokens,
        },
        rounds=tuple(_rejected(r, draft.token_ids) for r in judged.rounds),
    )


def _rejected(r: Round, draft_ids: Sequence[int]) -> Round:
    """The round with its own context before it, which is not part of the answer."""
    before = tuple(draft_ids[: r.at])
    ends = tuple(r.at + end for end in r.ends)
    return Round(0, (*before, *r.draft), ends, r.scores, 0)


async def sequential(client: Client, input_ids: Sequence[int]) -> Answer:
    """SpecReason's loop (arXiv:2504.07891) with PARSE's judge.

    The draft server writes one step, the target server judges the answer so far with
    one token's logits, and writes the step itself if that fails. Both find what they
    have seen before in their radix caches, so a verdict costs one pass over the step
    and the question.
    """
    start = time.perf_counter()
    ttft = 0.0
    output: list[int] = []
    rounds = []
    count = dict.fromkeys(
        (
            *("target_passes", "draft_tokens", "judged_segments", "kept_segments"),
            *("judged_tokens", "kept_tokens", "written_tokens"),
        ),
        0,
    )
    ended = False
    while not ended and len(output) < client.max_new_tokens:
        context = [*input_ids, *output]
        step = await _step(client, "draft", context, len(output))
        tokens = visible(step)
        score = await _judge(client, [*context, *tokens])
        is_kept = score >= client.threshold and bool(tokens)
        count["draft_tokens"] += step.num_tokens
        count["judged_segments"] += 1
        count["judged_tokens"] += len(tokens)
        count["target_passes"] += 1
        num_kept = len(tokens) if is_kept else 0
        rounds.append(Round(len(output), tokens, (len(tokens),), (score,), num_kept))
        if is_kept:
            count["kept_segments"] += 1
            count["kept_tokens"] += len(tokens)
            ttft = ttft or time.perf_counter() - start
        else:
            waited = time.perf_counter() - start
            step = await _step(client, "target", context, len(output))
            tokens = visible(step)
            count["target_passes"] += step.num_tokens
            count["written_tokens"] += step.num_tokens
            ttft = ttft or waited + step.ttft_s
        output += tokens
        ended = step.ended or not tokens
    return Answer(
        text=client.decode(output),
        token_ids=tuple(output),
        num_tokens=len(output) + ended,  # the end token counts, as in the other arms
        ttft_s=ttft,
        latency_s=time.perf_counter() - start,
        target_passes=count["target_passes"],
        counters=count,
        rounds=tuple(rounds),
    )


async def _step(
    client: Client, role: str, context: Sequence[int], num_output: int
) -> Reply:
    return await generate(
        client,
        role,
        context,
        stop=[client.step_stop],
        no_stop_trim=True,
        max_new_tokens=min(MAX_STEP_TOKENS, client.max_new_tokens - num_output),
    )


async def _judge(client: Client, answer_ids: Sequence[int]) -> float:
    """P(yes) / (P(yes) + P(no)) of the target after the answer so far."""
    ids = [i for pair in client.verdict_ids for i in pair]
    reply = await generate(
        client,
        "target",
        [*answer_ids, *client.suffix],
        top={"return_logprob": True, "token_ids_logprob": ids},
        max_new_tokens=1,
        temperature=0.0,  # SGLang's log probabilities are of scaled logits; PARSE's not
    )
    rows = reply.meta["output_token_ids_logprobs"][0]
    logprobs = {token: value for value, token, *_ in rows}
    yes = sum(math.exp(logprobs[y]) for y, _ in client.verdict_ids)
    no = sum(math.exp(logprobs[n]) for _, n in client.verdict_ids)
    return yes / (yes + no) if yes + no else 0.0


Procedure = Callable[[Client, Sequence[int]], Awaitable[Answer]]
PROCEDURES: dict[str, Procedure] = {
    "plain": plain,
    "cascade": cascade,
    "sequential": sequential,
}
