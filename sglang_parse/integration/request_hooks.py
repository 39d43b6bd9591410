"""Hooks that check a request's `parse_*` options before SGLang serves it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sglang_parse.options.checks import shown
from sglang_parse.options.request import check_custom_params


def check_sampling_params(result: Any, sampling_params: Any, *_: Any) -> Any:
    """AFTER hook on SamplingParams.verify: its ValueError becomes HTTP 400."""
    params = sampling_params
    params.max_new_tokens = check_limit(getattr(params, "max_new_tokens", 1))
    check_custom_params(getattr(params, "custom_params", None), params.max_new_tokens)
    return result


def check_generate_body(result: Any, body: Any, *_: Any) -> Any:
    """AFTER hook on generate_contract_error: HTTP 400 before a stream begins.

    body: parsed JSON of `/generate`; a batch has a list of sampling_params.
    """
    if result is not None or not isinstance(body, Mapping):
        return result
    params = body.get("sampling_params")
    try:
        for one in params if isinstance(params, list) else [params]:
            if isinstance(one, Mapping):
                limit = one.get("max_new_tokens")
                check_custom_params(one.get("custom_params"), limit)
    except ValueError as e:
        return str(e)
    return result


def check_limit(max_new_tokens: Any) -> int | None:
    """A limit that counts tokens: Ollama's `num_predict` comes as it was sent, and
    Ollama itself drops a fraction. Raises ValueError."""
    if max_new_tokens is None or isinstance(max_new_tokens, int):
        return max_new_tokens
    if isinstance(max_new_tokens, float) and math.isfinite(max_new_tokens):
        return int(max_new_tokens)
    raise ValueError(
        f"max_new_tokens is {shown(max_new_tokens)}; expected a number of tokens "
        "(max_tokens, num_predict)."
    )
