"""A request on its way through SGLang's TokenizerManager, of PARSE's servers."""

from __future__ import annotations

import asyncio
import contextvars
import math
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from sglang_parse.options.request import check_custom_params
from sglang_parse.options.server import ParseConfig
from sglang_parse.options.validation import shown
from sglang_parse.plugin.draft_prompts import set_entries
from sglang_parse.plugin.flags import config_from_server_args
from sglang_parse.plugin.stream_pieces import StreamPieces, stream_pieces
from sglang_parse.sgl.families import reads_images_of

# Of a stream, between which other requests are served.
PIECES_AT_A_TIME = 16
# Of /v1/messages: an answer, and the event of a stream that ends one.
ENDS = ("message", "message_delta")


@dataclass
class Exchange:
    """One HTTP request: what to add to its response.

    reports: `meta_info["parse"][0]` by choice, as they arrive. entries: of
    `custom_params`, for the drafters. is_openai: whether OpenAI's clients read the
    response, whose `metadata` may hold text alone. is_ollama: whether SGLang drops the
    text of a stream's last output.
    """

    add_report: bool = False
    add_usage: bool = False
    is_openai: bool = False
    is_ollama: bool = False
    reports: dict[int, dict[str, Any]] = field(default_factory=dict)
    entries: dict[str, Any] = field(default_factory=dict)

    @property
    def adds(self) -> bool:
        return self.add_report or self.add_usage

    def amend(self, body: dict[str, Any]) -> dict[str, Any]:
        """A response or stream chunk with reports and prediction counts added."""
        for choice in body.get("choices") or ():
            report = self.reports.get(choice.get("index", 0))
            if self.add_report and report and choice.get("finish_reason"):
                choice["meta_info"] = {"parse": [report]}
        parts = (body, body.get("response")) if self.add_report and self.reports else ()
        for part in (part for part in parts if isinstance(part, dict)):
            is_response = part.get("object") == "response" or part.get("done") is True
            if is_response or part.get("type") in ENDS:
                part["meta_info"] = {"parse": [*self.reports.values()]}
        usage = body.get("usage")
        if self.add_usage and usage and self.reports:
            reports = self.reports.values()
            accepted = sum(r.get("accepted_client_text_tokens", 0) for r in reports)
            total = sum(r.get("client_text_tokens", 0) for r in reports)
            details = usage.get("completion_tokens_details") or {}
            usage["completion_tokens_details"] = details | {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": total - accepted,
            }
        return body


current_exchange: contextvars.ContextVar[Exchange | None] = contextvars.ContextVar(
    "sglang_parse_exchange", default=None
)


def follow_request(
    result: AsyncIterator[Any], manager: Any, obj: Any, *_: Any, **__: Any
) -> AsyncIterator[Any]:
    """AFTER hook on TokenizerManager.generate_request: check the request before SGLang
    does, and correct and collect what its outputs say of PARSE."""
    exchange = current_exchange.get() or Exchange()
    set_entries(obj, exchange.entries)
    try:
        check_request(obj, manager)
    except ValueError as e:
        return _refuse(e)
    pieces = stream_pieces(obj, manager, config_of(manager))
    return _watch(result, exchange, pieces, exchange.is_ollama and obj.stream)


async def _refuse(error: ValueError) -> AsyncIterator[Any]:
    """SGLang answers a ValueError of a request's outputs with HTTP 400."""
    raise error
    yield  # makes this a generator


def check_request(obj: Any, manager: Any) -> None:
    """Raise ValueError for options and media that cannot be served.

    obj: GenerateReqInput or EmbeddingReqInput as it was sent.
    """
    given = getattr(obj, "sampling_params", None)
    check_params(given, config_of(manager))
    for params in given if isinstance(given, list) else [given]:
        if isinstance(params, dict) and "max_new_tokens" in params:
            params["max_new_tokens"] = check_limit(params["max_new_tokens"])
    if manager.mm_processor is not None:
        (architecture, *_) = manager.model_config.hf_config.architectures
        check_media(obj, architecture)


# By TokenizerManager. Reading them may read a file.
_configs: WeakKeyDictionary[Any, ParseConfig] = WeakKeyDictionary()


def config_of(manager: Any) -> ParseConfig:
    """The settings of a TokenizerManager's server."""
    if manager not in _configs:
        _configs[manager] = config_from_server_args(manager.server_args)
    return _configs[manager]


def check_params(sampling_params: Any, config: ParseConfig) -> None:
    """Check the `parse_*` options of a request, or of each of a batch. Raises
    ValueError."""
    is_batch = isinstance(sampling_params, list)
    for params in sampling_params if is_batch else [sampling_params]:
        if isinstance(params, Mapping):
            limit = params.get("max_new_tokens")
            check_custom_params(params.get("custom_params"), limit, config=config)


def check_limit(max_new_tokens: Any) -> int | None:
    """A whole number of tokens. Ollama's `num_predict` arrives as it was sent, and
    Ollama itself drops a fraction. Raises ValueError."""
    if max_new_tokens is None or isinstance(max_new_tokens, int):
        return max_new_tokens
    if isinstance(max_new_tokens, float) and math.isfinite(max_new_tokens):
        return int(max_new_tokens)
    raise ValueError(
        f"max_new_tokens is {shown(max_new_tokens)}; expected a number of tokens "
        "(max_tokens, num_predict)."
    )


def check_media(obj: Any, architecture: str) -> None:
    """Raise ValueError for media that no test has proven for a multimodal model."""
    contains = getattr(obj, "contains_mm_input", None)
    if contains is None or not contains():
        return
    reads_images = reads_images_of(architecture)
    if reads_images and not obj.video_data and not obj.audio_data:
        return
    what = "video or audio" if reads_images else "images, video or audio"
    wanted = "text and images" if reads_images else "text alone"
    raise ValueError(
        f"The request has {what}, which no test of PARSE has proven for "
        f"{architecture}; send {wanted}, or serve the model without "
        "--speculative-algorithm PARSE."
    )


async def _watch(
    result: AsyncIterator[Any],
    exchange: Exchange,
    pieces: StreamPieces | None,
    loses_last: bool,
) -> AsyncIterator[Any]:
    """The outputs with PARSE's accept rate, in pieces. Their reports are kept for
    `exchange`. loses_last: the text of the last one comes once more before it."""
    async with aclosing(result) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            for at, one in enumerate(output if isinstance(output, list) else [output]):
                meta_info = one.get("meta_info", {})
                correct_accept_rate(meta_info)
                if exchange.is_openai and len(meta_info.get("weight_versions", ())) < 2:
                    # SGLang repeats `weight_version` in a list, in `metadata`.
                    meta_info.pop("weight_versions", None)
                if reports := meta_info.get("parse"):
                    exchange.reports[one.get("index", at)] = reports[-1]
            parts = pieces.split(output) if pieces else [output]
            for num, piece in enumerate(parts):
                if num % PIECES_AT_A_TIME == PIECES_AT_A_TIME - 1:
                    await asyncio.sleep(0)
                if loses_last and piece["meta_info"]["finish_reason"]:
                    yield piece | {"meta_info": {}}
                yield piece


def correct_accept_rate(meta_info: dict[str, Any]) -> None:
    """Divide by the tokens that were drafted, in place.

    SGLang assumes a fixed number of drafts per verify step. Ours differ, and travel as
    the cap of each round (plugin/result.py, `cap_lens`).
    """
    if "spec_num_proposed_drafts" not in meta_info:
        return
    cap_length = meta_info.get("spec_cap_length", 0)  # absent if nothing was drafted
    proposed = round(cap_length * meta_info["spec_verify_ct"])
    meta_info["spec_num_proposed_drafts"] = proposed
    correct = meta_info["spec_num_correct_drafts"]
    meta_info["spec_accept_rate"] = correct / proposed if proposed else 0.0
