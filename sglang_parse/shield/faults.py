"""What SGLang 0.5.23 does not survive in a request: one check for each fault.

A check returns the sentence for the client, or "" if the request does not have the
fault.
"""

from __future__ import annotations

import functools
import json
import math
import pickletools
import reprlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson
import regex

from sglang_parse.shield.weight_files import problem_of_weights

# Fields for which the scheduler expects one value per request of a batch.
SCALARS = (
    *("return_hidden_states", "return_logprob", "logprob_start_len", "priority"),
    *("top_logprobs_num", "stream", "return_sampling_mask", "sampling_logprobs_mode"),
    *("extra_key", "cache_salt", "routed_dp_rank", "custom_logit_processor"),
)
# Of custom_params. SGLang's own recursion fails at some hundreds of levels.
MAX_DEPTH = 64
INT32_MAX = 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)
# Logits stay finite in float32 under these, at the lowest temperature too.
MIN_PENALTY, MAX_BIAS = 1e-6, 1e30
# Answers to one prompt. Others wait while SGLang copies the request for each.
MAX_N = 512
# Logprobs of a prompt: SGLang makes lists of them all in one step.
MAX_PROMPT_LOGPROBS = 1 << 18
GRAMMARS = ("json_schema", "regex", "ebnf", "structural_tag")
SESSION_FIELDS = {
    **{"id": str, "rid": str, "offset": int},
    **{"replace": bool, "drop_previous_output": bool},
}
MAX_MESSAGE = 500
# How SGLang's error begins if a grammar refuses a token (batch_result_processor.py).
# Tokens are drawn from what the grammar allows, so it allows none at all.
GRAMMAR_FAILED = "Grammar accept_token failed"
NO_TOKEN_ALLOWED = (
    "The grammar (json_schema, regex, ebnf, structural_tag or response_format) allows "
    "no token at this point of the answer; expected one that a text can satisfy."
)
OWN_TEMPLATE = (
    "chat_template_kwargs has a chat_template; expected options of the server's own "
    "template. Start the server with --trust-request-chat-template to permit it."
)

_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def shown(value: Any) -> str:
    """`value` as a sentence shows it: one short line, whatever a client sent."""
    return _short.repr(value)


def refused(name: str, value: Any, expected: str) -> str:
    """The sentence about a field. expected: without the full stop."""
    return f"{name} is {shown(value)}; expected {expected}."


@dataclass(frozen=True)
class Seen:
    """One request as SGLang is about to send it to the scheduler."""

    #: TokenizedGenerateReqInput of managers/io_struct.py; its token ids are an array.
    tokenized: Any
    vocab_size: int


def scalars(seen: Seen) -> str:
    for name in SCALARS:
        value = getattr(seen.tokenized, name, None)
        if isinstance(value, (list, dict)):
            return refused(name, value, "one value for one prompt")
    return ""


def prompt(seen: Seen) -> str:
    ids, one = seen.tokenized.input_ids, seen.tokenized
    has_other = one.input_embeds is not None or one.session_params is not None
    if ids is not None and not len(ids) and not has_other:
        return "The prompt has no tokens; expected at least one."
    return ""


def vocabulary(seen: Seen) -> str:
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


def num_logprobs(seen: Seen) -> str:
    num = seen.tokenized.top_logprobs_num or 0
    if seen.tokenized.return_logprob and not 0 <= num <= seen.vocab_size:
        name = "top_logprobs_num (logprobs, top_logprobs)"
        return refused(name, num, f"0 to {seen.vocab_size}")
    return ""


def prompt_logprobs(seen: Seen) -> str:
    one = seen.tokenized
    start = one.logprob_start_len
    if not one.return_logprob or start is None or start < 0 or one.input_ids is None:
        return ""
    num_tokens = max(0, len(one.input_ids) - start)
    given = getattr(one, "token_ids_logprob", None) or ()
    num = max(one.top_logprobs_num or 0, len(given))
    if num * num_tokens > MAX_PROMPT_LOGPROBS:
        return (
            f"{num} logprobs of each of {num_tokens} prompt tokens are asked for; "
            f"expected at most {MAX_PROMPT_LOGPROBS} in all: lower top_logprobs_num "
            "(logprobs, top_logprobs, token_ids_logprob) or raise logprob_start_len."
        )
    return ""


def logprob_start(seen: Seen) -> str:
    start = seen.tokenized.logprob_start_len
    if start is not None and start < -1:
        return refused("logprob_start_len", start, "-1 or more")
    return ""


def stop_tokens(seen: Seen) -> str:
    params = seen.tokenized.sampling_params
    for token in params.stop_token_ids or ():
        if not 0 <= token < seen.vocab_size and params.min_new_tokens > 0:
            return (
                f"stop_token_ids has {shown(token)} beside min_new_tokens; expected "
                f"0 to {seen.vocab_size - 1}."
            )
    num = len(params.stop_token_ids or ())
    if params.min_new_tokens > 0 and num > seen.vocab_size // 2:
        return (
            f"stop_token_ids has {num} tokens beside min_new_tokens; expected at most "
            "half of the vocabulary."
        )
    return ""


def early_end(seen: Seen) -> str:
    """A grammar may leave only the end of the answer, which min_new_tokens forbids."""
    params = seen.tokenized.sampling_params
    for name in GRAMMARS:
        if params.min_new_tokens > 0 and getattr(params, name) is not None:
            return (
                f"min_new_tokens (min_tokens) is {params.min_new_tokens} beside "
                f"{name}; expected 0, because a grammar decides where an answer ends."
            )
    return ""


def expressions(seen: Seen) -> str:
    """What Python's `re` has read already; `bounded_stops` searches with `regex`."""
    for text in seen.tokenized.sampling_params.stop_regex_strs or ():
        try:
            regex.compile(text)
        except (regex.error, RecursionError) as e:
            return f"stop_regex is {shown(text)}, which cannot be read ({e})."
    return ""


def session(seen: Seen) -> str:
    given = seen.tokenized.session_params
    if given is None:
        return ""
    for name, kind in SESSION_FIELDS.items():
        value = getattr(given, name, None)
        if value is not None and type(value) is not kind:
            return refused(f"session_params.{name}", value, f"{kind.__name__} or null")
    if getattr(given, "replace", None) and getattr(given, "rid", None) is None:
        return (
            "session_params has replace and no rid; expected the rid of the request "
            "that is replaced."
        )
    return ""


def drop_unknown_stops(params: Any, vocab_size: int) -> None:
    """Leave out stop tokens beyond the vocabulary, which no answer contains.

    Beside another request's `min_new_tokens` SGLang indexes with those of the whole
    batch, and they end its scheduler (sampling/penaltylib/min_new_tokens.py).
    """
    known = params.stop_token_ids
    if known and not all(0 <= token < vocab_size for token in known):
        params.stop_token_ids = {t for t in known if 0 <= t < vocab_size} or None


def top_k(seen: Seen) -> str:
    value = seen.tokenized.sampling_params.top_k
    if value > INT32_MAX:
        return refused("top_k", value, f"-1, or 1 to {INT32_MAX}")
    return ""


def temperature(seen: Seen) -> str:
    value = seen.tokenized.sampling_params.temperature
    if math.isfinite(value) and value > FLOAT32_MAX:
        return refused("temperature", value, f"at most {FLOAT32_MAX:.1e}")
    return ""


def penalty(seen: Seen) -> str:
    value = seen.tokenized.sampling_params.repetition_penalty
    if 0 < value < MIN_PENALTY:
        return refused("repetition_penalty", value, f"{MIN_PENALTY} to 2")
    return ""


def bias(seen: Seen) -> str:
    for token, value in (seen.tokenized.sampling_params.logit_bias or {}).items():
        if not isinstance(value, (int, float)) or not abs(value) <= MAX_BIAS:
            name = f"logit_bias of token {shown(token)}"
            expected = f"a number from {-MAX_BIAS:.0e} to {MAX_BIAS:.0e}"
            return refused(name, value, expected)
    return ""


def nesting(seen: Seen) -> str:
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


def logit_processor(seen: Seen) -> str:
    given = seen.tokenized.custom_logit_processor
    if not given or _is_pickled(given):
        return ""
    expected = "what CustomLogitProcessor.to_str returns"
    return refused("custom_logit_processor", given, expected)


@functools.lru_cache(maxsize=64)  # clients send the same one with every request
def _is_pickled(given: str) -> bool:
    """Whether a text is what `CustomLogitProcessor.to_str` returns. Nothing is run."""
    try:
        data = bytes.fromhex(orjson.loads(given)["callable"])
        return sum(1 for _ in pickletools.genops(data)) > 0
    except (ValueError, TypeError, KeyError):
        return False


def overrides(seen: Seen) -> str:
    given = seen.tokenized.positional_embed_overrides
    if given is None or hasattr(given, "reconstruct"):
        return ""
    expected = "none, as they cannot be sent as JSON"
    return refused("positional_embed_overrides", given, expected)


CHECKS = (
    scalars,  # the first, because the others compare the values
    *(prompt, vocabulary, num_logprobs, logprob_start, prompt_logprobs, stop_tokens),
    *(early_end, expressions, session, temperature, penalty, bias, top_k),
    *(logit_processor, overrides, nesting),
)


def problem_of(tokenized: Any, vocab_size: int) -> str:
    """The sentence for a request that the scheduler would not survive, or ""."""
    seen = Seen(tokenized, vocab_size)
    return next((told for check in CHECKS if (told := check(seen))), "")


def problem_of_update(body: bytes, served: str = "") -> str:
    """The sentence for a body of /update_weights_from_disk that asks for a format that
    SGLang does not know, or for weights that do not fit, or "".

    served: the model that the server was started with.
    """
    from sglang.srt.configs.load_config import LoadFormat

    try:
        asked = orjson.loads(body)
        path, load_format = asked.get("model_path"), asked.get("load_format")
    except (ValueError, AttributeError):
        return ""  # SGLang says what is wrong with it
    known = [str(one.value) for one in LoadFormat]
    if load_format is not None and load_format not in known:
        return refused("load_format", load_format, f"one of {', '.join(known)}")
    if isinstance(path, str) and (told := problem_of_weights(path, served)):
        expected = "weights of the served model's shapes"
        return f"{refused('model_path', path, expected)[:-1]}: {told}."
    return ""


def holds_template(body: bytes) -> bool:
    """Whether a request brings a chat template, which is a program that may not end."""
    try:
        asked = json.loads(body)
    except (ValueError, RecursionError):
        return False  # SGLang says what is wrong with it
    options = asked.get("chat_template_kwargs") if isinstance(asked, dict) else None
    return isinstance(options, dict) and "chat_template" in options


def problem_of_input(obj: Any, server_args: Any) -> str:
    """The sentence for a request that the HTTP process would not survive, or "".

    obj: GenerateReqInput as it was sent.
    """
    labels = getattr(obj, "custom_labels", None)
    if labels and getattr(server_args, "enable_metrics", False):
        known = getattr(server_args, "tokenizer_metrics_allowed_custom_labels", None)
        if not isinstance(labels, dict) or not set(labels) <= set(known or ()):
            names = ", ".join(known or ()) or "none"
            flag = "--tokenizer-metrics-allowed-custom-labels"
            expected = f"names among those of {flag}, which are {names}"
            return refused("custom_labels", labels, expected)
    params = getattr(obj, "sampling_params", None)
    for one in params if isinstance(params, list) else [params]:
        num = one.get("n") if isinstance(one, dict) else None
        if isinstance(num, int) and num > MAX_N:
            return refused("n", num, f"at most {MAX_N}")
    return ""


def sentence_of(error: BaseException) -> str:
    """The sentence for a request on which SGLang's front end raised."""
    if isinstance(error, ValueError) and str(error):
        return str(error)[:MAX_MESSAGE]  # SGLang's own sentence
    return f"The request cannot be read ({type(error).__name__}: {shown(str(error))})."
