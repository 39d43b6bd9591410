"""What a request has that SGLang's scheduler would not survive, one check each.

A check gives the sentence for the client, or "". shield.py names the request that
shows each of them.
"""

from __future__ import annotations

import functools
import math
import pickletools
from dataclasses import dataclass
from typing import Any

import numpy as np
import orjson

from sglang_parse.options.checks import shown

# Fields of which SGLang's scheduler, having split a batch, expects one value each.
SCALARS = (
    *("return_hidden_states", "return_logprob", "logprob_start_len", "priority"),
    *("top_logprobs_num", "stream", "return_sampling_mask", "sampling_logprobs_mode"),
    *("extra_key", "cache_salt", "routed_dp_rank", "custom_logit_processor"),
)
# Of custom_params. SGLang fails at some hundreds, where its own recursion ends.
MAX_DEPTH = 64
INT32_MAX = 2**31 - 1
FLOAT32_MAX = float(np.finfo(np.float32).max)
# Logits stay finite in float32 under these, at the lowest temperature too.
MIN_PENALTY, MAX_BIAS = 1e-6, 1e30


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
            return f"{name} is {shown(value)}; expected one value for one prompt."
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
        return (
            f"top_logprobs_num (logprobs, top_logprobs) is {shown(num)}; expected 0 to "
            f"{seen.vocab_size}."
        )
    return ""


def logprob_start(seen: Seen) -> str:
    start = seen.tokenized.logprob_start_len
    if start is not None and start < -1:
        return f"logprob_start_len is {shown(start)}; expected -1 or more."
    return ""


def stop_tokens(seen: Seen) -> str:
    params = seen.tokenized.sampling_params
    for token in params.stop_token_ids or ():
        if not 0 <= token < seen.vocab_size and params.min_new_tokens > 0:
            return (
                f"stop_token_ids has {shown(token)} beside min_new_tokens; expected "
                f"0 to {seen.vocab_size - 1}."
            )
    return ""


def drop_unknown_stops(params: Any, vocab_size: int) -> None:
    """Leave out stop tokens of no vocabulary, which no answer has.

    With another request's `min_new_tokens` SGLang reads those of the whole batch, and
    they end its scheduler (sampling/penaltylib/min_new_tokens.py).
    """
    known = params.stop_token_ids
    if known and not all(0 <= token < vocab_size for token in known):
        params.stop_token_ids = {t for t in known if 0 <= t < vocab_size} or None


def top_k(seen: Seen) -> str:
    value = seen.tokenized.sampling_params.top_k
    if value > INT32_MAX:
        return f"top_k is {shown(value)}; expected -1, or 1 to {INT32_MAX}."
    return ""


def temperature(seen: Seen) -> str:
    value = seen.tokenized.sampling_params.temperature
    if math.isfinite(value) and value > FLOAT32_MAX:
        return f"temperature is {shown(value)}; expected at most {FLOAT32_MAX:.1e}."
    return ""


def penalty(seen: Seen) -> str:
    value = seen.tokenized.sampling_params.repetition_penalty
    if 0 < value < MIN_PENALTY:
        return f"repetition_penalty is {shown(value)}; expected {MIN_PENALTY} to 2."
    return ""


def bias(seen: Seen) -> str:
    for token, value in (seen.tokenized.sampling_params.logit_bias or {}).items():
        if not isinstance(value, (int, float)) or not abs(value) <= MAX_BIAS:
            return (
                f"logit_bias of token {shown(token)} is {shown(value)}; expected a "
                f"number from {-MAX_BIAS:.0e} to {MAX_BIAS:.0e}."
            )
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


def overrides(seen: Seen) -> str:
    given = seen.tokenized.positional_embed_overrides
    if given is None or hasattr(given, "reconstruct"):
        return ""
    return (
        f"positional_embed_overrides is {shown(given)}; expected none, as they cannot "
        "be sent as JSON."
    )
