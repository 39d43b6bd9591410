"""Requests that end the scheduler of a stock SGLang 0.5.23 server, or that it answers
with HTTP 500 or breaks off although the request is at fault.

tests/integration/test_shield.py sends them to a stock server, so that a row is removed
when SGLang fixes its cause.
"""

from dataclasses import dataclass
from typing import Any

GENERATE, CHAT = "/generate", "/v1/chat/completions"
ENDS, FAILS, BREAKS = "ends the scheduler", "HTTP 50x", "breaks the response off"


@dataclass(frozen=True)
class HostileRequest:
    """One request that a stock server does not survive, or does not understand."""

    name: str
    #: What a stock server does with the request: ENDS, FAILS or BREAKS.
    effect: str
    #: Path and JSON body of a request that shows it.
    path: str
    body: Any
    #: Flags that the stock server needs for it.
    flags: tuple[str, ...] = ()


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
    *,
    path: str = GENERATE,
    flags: tuple[str, ...] = (),
) -> HostileRequest:
    return HostileRequest(name, effect, path, body, flags)


_CHAT_BODY = {
    "model": "default",
    "messages": [{"role": "user", "content": "1+2"}],
    "max_tokens": 4,
}

# Without it SGLang's sampler takes token 0 where a probability is no number.
_TOP_P = {"top_p": 0.9}

_OLLAMA_CHAT = {"model": "m", "messages": [{"role": "user", "content": "1"}]}

REQUESTS = (
    _row(
        "list in place of one value",
        ENDS,
        _body(return_hidden_states=[]),
    ),
    _row("empty prompt", ENDS, _body("")),
    _row(
        "grammar that allows only the end beside min_new_tokens",
        ENDS,
        _body(
            params={
                **{"regex": "(Yes|No)", "min_new_tokens": 8, "max_new_tokens": 27},
                **{"temperature": 1, **_TOP_P},
            }
        ),
    ),
    _row(
        "token ids beyond the vocabulary",
        ENDS,
        _body(None, input_ids=[10**6]),
    ),
    _row("negative token ids", ENDS, _body(None, input_ids=[5, -5])),
    _row(
        "more logprobs than tokens",
        ENDS,
        _body(return_logprob=True, top_logprobs_num=10**6),
    ),
    _row(
        "logprobs from before the prompt",
        ENDS,
        _body(return_logprob=True, logprob_start_len=-2),
    ),
    _row(
        "least length with a stop token of no vocabulary",
        ENDS,
        _body(params={"min_new_tokens": 2, "stop_token_ids": [-1]}),
    ),
    _row(
        "temperature that is infinite in float32, under a grammar",
        ENDS,
        _body(params={"temperature": 1e308, "regex": "[0-9]+", **_TOP_P}),
    ),
    _row(
        "repetition penalty that is 0 in float32",
        ENDS,
        _body(params={"repetition_penalty": 1e-300, "temperature": 1, **_TOP_P}),
    ),
    _row(
        "bias that is infinite in float32",
        ENDS,
        _body(params={"logit_bias": {"7": 1e308}, "temperature": 1, **_TOP_P}),
    ),
    _row(
        "top_k of more than 32 bits",
        ENDS,
        _body(params={"top_k": 2**40, "temperature": 1}),
    ),
    _row(
        "logit processor that is no JSON",
        ENDS,
        _body(custom_logit_processor="zzz"),
        flags=("--enable-custom-logit-processor",),
    ),
    _row(
        "embeddings in place of tokens",
        ENDS,
        _body(positional_embed_overrides=[1]),
    ),
    _row("broken stop_regex", FAILS, _body(params={"stop_regex": "("})),
    _row(
        "deep nesting",
        FAILS,
        _body(params={"custom_params": {"x": _nested(900)}}),
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
    _row(
        "stream of a text's tokens",
        FAILS,
        {"model": "default", "prompt": "1", "stream": True},
        path="/v1/tokenize",
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
