"""What one request can do to a stock server of SGLang 0.5.23, and what PARSE answers.

Each row of CHECKS is a request that ends SGLang's scheduler, or that SGLang answers
with HTTP 500 though the request is at fault. tests/integration/test_shield.py sends
them to a stock server, so that a row goes when SGLang mends what the row is for.
shield_hooks.py asks the rows; `--no-speculative-parse-request-checks` switches them
off.
"""

from __future__ import annotations

import functools
import math
import pickletools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import orjson

from sglang_parse.options.checks import shown
from sglang_parse.runtime.families import reads_images_of

GENERATE, CHAT = "/generate", "/v1/chat/completions"
ENDS, FAILS, BREAKS = "ends the scheduler", "HTTP 500", "breaks the response off"
# Fields of which SGLang's scheduler, having split a batch, expects one value each.
SCALARS = (
    *("return_hidden_states", "return_logprob", "logprob_start_len", "priority"),
    *("top_logprobs_num", "stream", "return_sampling_mask", "sampling_logprobs_mode"),
    *("extra_key", "cache_salt", "routed_dp_rank", "custom_logit_processor"),
)
# Answers to one prompt. SGLang makes a copy of the request for each before it checks
# anything.
MAX_N = 4096
# Of custom_params. SGLang fails at some hundreds, where its own recursion ends.
MAX_DEPTH = 64
MAX_TOLD = 500
INT32_MAX = 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)


@dataclass(frozen=True)
class Seen:
    """One request as SGLang is about to send it to the scheduler."""

    #: TokenizedGenerateReqInput of managers/io_struct.py; its token ids are an array.
    tokenized: Any
    vocab_size: int


@dataclass(frozen=True)
class Check:
    """One thing that a stock server does not survive, or does not understand."""

    name: str
    #: What a stock server does with the request: ENDS, FAILS or BREAKS.
    effect: str
    #: Path and JSON body of a request that shows it.
    path: str
    body: Any
    #: The sentence for a request that has the fault, "" for others. None where SGLang
    #: itself raises before the scheduler has the request (`told_of`).
    find: Callable[[Seen], str] | None = None
    #: Flags that the stock server needs for it.
    flags: tuple[str, ...] = field(default=())


def _scalars(seen: Seen) -> str:
    for name in SCALARS:
        value = getattr(seen.tokenized, name, None)
        if isinstance(value, (list, dict)):
            return f"{name} is {shown(value)}; expected one value for one prompt."
    return ""


def _prompt(seen: Seen) -> str:
    ids, one = seen.tokenized.input_ids, seen.tokenized
    has_other = one.input_embeds is not None or one.session_params is not None
    if ids is not None and not len(ids) and not has_other:
        return "The prompt has no tokens; expected at least one."
    return ""


def _vocabulary(seen: Seen) -> str:
    ids = seen.tokenized.input_ids
    if ids is None or not len(ids):
        return ""
    found = np.frombuffer(ids, dtype=np.int64)
    for worst in (found.max(), found.min()):
        if not 0 <= worst < seen.vocab_size:
            return (
                f"The prompt has the token id {worst}; expected 0 to "
                f"{seen.vocab_size - 1}."
            )
    return ""


def _num_logprobs(seen: Seen) -> str:
    num = seen.tokenized.top_logprobs_num or 0
    if seen.tokenized.return_logprob and not 0 <= num <= seen.vocab_size:
        return (
            f"top_logprobs_num (logprobs, top_logprobs) is {shown(num)}; expected 0 to "
            f"{seen.vocab_size}."
        )
    return ""


def _logprob_start(seen: Seen) -> str:
    start = seen.tokenized.logprob_start_len
    if start is not None and start < -1:
        return f"logprob_start_len is {shown(start)}; expected -1 or more."
    return ""


def _stop_tokens(seen: Seen) -> str:
    params = seen.tokenized.sampling_params
    for token in params.stop_token_ids or ():
        if not 0 <= token < seen.vocab_size and params.min_new_tokens > 0:
            return (
                f"stop_token_ids has {shown(token)} beside min_new_tokens; expected "
                f"0 to {seen.vocab_size - 1}."
            )
    return ""


def _top_k(seen: Seen) -> str:
    value = seen.tokenized.sampling_params.top_k
    if value > INT32_MAX:
        return f"top_k is {shown(value)}; expected -1, or 1 to {INT32_MAX}."
    return ""


def _temperature(seen: Seen) -> str:
    value = seen.tokenized.sampling_params.temperature
    if math.isfinite(value) and value > FLOAT32_MAX:
        return f"temperature is {shown(value)}; expected at most {FLOAT32_MAX:.1e}."
    return ""


def _nesting(seen: Seen) -> str:
    level, depth = [seen.tokenized.sampling_params.custom_params], 0
    while level := [
        part
        for value in level
        if isinstance(value, (dict, list))
        for part in (value.values() if isinstance(value, dict) else value)
    ]:
        depth += 1
        if depth > MAX_DEPTH:
            return f"custom_params is nested deeper than {MAX_DEPTH} levels."
    return ""


def _logit_processor(seen: Seen) -> str:
    given = seen.tokenized.custom_logit_processor
    if not given or _is_pickled(given):
        return ""
    return (
        f"custom_logit_processor is {shown(given)}; expected what "
        "CustomLogitProcessor.to_str gives."
    )


@functools.lru_cache(maxsize=64)  # clients send the same one with every request
def _is_pickled(given: str) -> bool:
    """Whether a text is what `CustomLogitProcessor.to_str` gives. Nothing is run."""
    try:
        data = bytes.fromhex(orjson.loads(given)["callable"])
        return sum(1 for _ in pickletools.genops(data)) > 0
    except (ValueError, TypeError, KeyError):
        return False


def _overrides(seen: Seen) -> str:
    given = seen.tokenized.positional_embed_overrides
    if given is None or hasattr(given, "reconstruct"):
        return ""
    return (
        f"positional_embed_overrides is {shown(given)}; expected none, as they cannot "
        "be sent as JSON."
    )


def _body(text: Any = "1+2", **fields: Any) -> dict[str, Any]:
    """A /generate body; `params` are its sampling parameters."""
    params = {"max_new_tokens": 4, "temperature": 0, **fields.pop("params", {})}
    prompt = {} if text is None else {"text": text}
    return {**prompt, **fields, "sampling_params": params}


def _nested(depth: int) -> list[Any]:
    """Lists in lists."""
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


def _row(
    name: str,
    effect: str,
    body: Any,
    find: Callable[[Seen], str] | None = None,
    *,
    path: str = GENERATE,
    flags: tuple[str, ...] = (),
) -> Check:
    return Check(name, effect, path, body, find, flags)


_CHAT_BODY = {
    "model": "default",
    "messages": [{"role": "user", "content": "1+2"}],
    "max_tokens": 4,
}

_OLLAMA_CHAT = {"model": "m", "messages": [{"role": "user", "content": "1"}]}

CHECKS = (
    # The first: others compare the values.
    _row("list in place of one value", ENDS, _body(return_hidden_states=[]), _scalars),
    _row("empty prompt", ENDS, _body(""), _prompt),
    _row(
        "token ids beyond the vocabulary",
        ENDS,
        _body(None, input_ids=[10**6]),
        _vocabulary,
    ),
    _row("negative token ids", ENDS, _body(None, input_ids=[5, -5]), _vocabulary),
    _row(
        "more logprobs than tokens",
        ENDS,
        _body(return_logprob=True, top_logprobs_num=10**6),
        _num_logprobs,
    ),
    _row(
        "logprobs from before the prompt",
        ENDS,
        _body(return_logprob=True, logprob_start_len=-2),
        _logprob_start,
    ),
    _row(
        "least length with a stop token of no vocabulary",
        ENDS,
        _body(params={"min_new_tokens": 2, "stop_token_ids": [-1]}),
        _stop_tokens,
    ),
    _row(
        "temperature that is infinite in float32, under a grammar",
        ENDS,
        _body(params={"temperature": 1e308, "regex": "[0-9]+"}),
        _temperature,
    ),
    _row(
        "top_k of more than 32 bits",
        ENDS,
        _body(params={"top_k": 2**40, "temperature": 1}),
        _top_k,
    ),
    _row(
        "logit processor that is no JSON",
        ENDS,
        _body(custom_logit_processor="zzz"),
        _logit_processor,
        flags=("--enable-custom-logit-processor",),
    ),
    _row(
        "embeddings in place of tokens",
        ENDS,
        _body(positional_embed_overrides=[1]),
        _overrides,
    ),
    _row("broken stop_regex", FAILS, _body(params={"stop_regex": "("})),
    _row(
        "deep nesting",
        FAILS,
        _body(params={"custom_params": {"x": _nested(900)}}),
        _nesting,
    ),
    _row("list of parameters", FAILS, {"text": "1", "sampling_params": [{}]}),
    _row("list of no parameters", FAILS, {"text": ["1", "2"], "sampling_params": []}),
    _row("list as rid of one prompt", FAILS, _body(rid=["x"])),
    _row("no input_embeds", FAILS, _body(None, input_embeds=[])),
    _row(
        "lists of two lengths",
        FAILS,
        _body(["1", "2"], return_logprob=[True, False], top_logprobs_num=[2]),
    ),
    _row("unknown session field", FAILS, _body(session_params={"x": 1})),
    _row("null in place of an object", FAILS, None, path=CHAT),
    _row("list in place of an object", FAILS, [], path=CHAT),
    _row("number in place of an object", FAILS, 5, path="/invocations"),
    _row(
        "broken stop_regex in a chat",
        FAILS,
        _CHAT_BODY | {"stop_regex": "("},
        path=CHAT,
    ),
    _row("list as rid of a chat", FAILS, _CHAT_BODY | {"rid": ["x"]}, path=CHAT),
    _row(
        "argument of the chat template that SGLang gives itself",
        FAILS,
        _CHAT_BODY | {"chat_template_kwargs": {"tokenize": True}},
        path=CHAT,
    ),
    _row(
        "Ollama options of no number",
        FAILS,
        {"model": "m", "prompt": "1", "stream": False, "options": {"temperature": "y"}},
        path="/api/generate",
    ),
    _row(
        "Ollama stream that is too long",
        BREAKS,
        {"model": "m", "prompt": "1", "options": {"num_predict": 10**6}},
        path="/api/generate",
    ),
    _row(
        "Ollama chat stream that is too long",
        BREAKS,
        _OLLAMA_CHAT | {"options": {"num_predict": 10**6}},
        path="/api/chat",
    ),
    _row(
        "Ollama chat without messages",
        FAILS,
        {"model": "m", "messages": [], "stream": False},
        path="/api/chat",
    ),
    _row(
        "unknown Vertex parameter",
        FAILS,
        {"instances": [{"text": "1"}], "parameters": {"zzz": 1}},
        path="/vertex_generate",
    ),
    _row(
        "negative token to detokenize",
        FAILS,
        {"model": "m", "tokens": [-1]},
        path="/v1/detokenize",
    ),
)

_FINDS = tuple(dict.fromkeys(row.find for row in CHECKS if row.find is not None))


def problem_of(tokenized: Any, vocab_size: int) -> str:
    """The sentence for a request that the scheduler would not survive, or ""."""
    seen = Seen(tokenized, vocab_size)
    for find in _FINDS:
        if told := find(seen):
            return told
    return ""


def problem_of_input(obj: Any) -> str:
    """The sentence for a request that the HTTP process would not survive, or "".

    obj: GenerateReqInput as it was sent.
    """
    params = getattr(obj, "sampling_params", None)
    for one in params if isinstance(params, list) else [params]:
        num = one.get("n") if isinstance(one, dict) else None
        if isinstance(num, int) and num > MAX_N:
            return f"n is {shown(num)}; expected at most {MAX_N}."
    return ""


def problem_of_media(obj: Any, architecture: str) -> str:
    """The sentence for a request with media that no test has proven, or "".

    obj: GenerateReqInput or EmbeddingReqInput of a multimodal model. architecture: the
    model's name.
    """
    contains = getattr(obj, "contains_mm_input", None)
    if contains is None or not contains():
        return ""
    reads_images = reads_images_of(architecture)
    others = bool(obj.video_data) or bool(obj.audio_data)
    if reads_images and not others:
        return ""
    what = "video or audio" if reads_images else "images, video or audio"
    wanted = "text and images" if reads_images else "text alone"
    return (
        f"The request has {what}, which no test of PARSE has proven for "
        f"{architecture}; send {wanted}, or serve the model without "
        "--speculative-algorithm PARSE."
    )


def told_of(error: BaseException) -> str:
    """The sentence for a request on which SGLang's front end raised."""
    if isinstance(error, ValueError) and str(error):
        return str(error)[:MAX_TOLD]  # SGLang's own sentence
    return f"The request cannot be read ({type(error).__name__}: {shown(str(error))})."
