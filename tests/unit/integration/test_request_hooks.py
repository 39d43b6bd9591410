"""The hooks that refuse a request before SGLang serves it."""

import math
from types import SimpleNamespace

import pytest

from sglang_parse.integration.request_hooks import (
    check_generate_body,
    check_limit,
    check_sampling_params,
)
from sglang_parse.options.request import check_custom_params


def test_hook_returns_its_result_and_raises_value_error():
    """Red if the hook swallows the error or replaces SamplingParams.verify's result."""
    good = SimpleNamespace(custom_params={"parse_mode": "off"})
    bad = SimpleNamespace(custom_params={"parse_mode": "loud"})
    assert check_sampling_params("kept", good, 1000) == "kept"
    assert check_sampling_params(None, SimpleNamespace(), 1000) is None
    with pytest.raises(ValueError, match="parse_mode"):
        check_sampling_params(None, bad, 1000)


@pytest.mark.parametrize("limit", [None, 0, 2, 1 << 30])
def test_parse_verify_is_refused_with_a_response_length(limit):
    """Red if a request that generates nothing may ask for tokens, or for any number."""
    custom = {"parse_verify": "text"}
    assert check_custom_params(custom, 1) == custom
    params = SimpleNamespace(custom_params=custom, max_new_tokens=limit)
    with pytest.raises(ValueError, match=f"max_new_tokens is {limit}; expected 1"):
        check_sampling_params(None, params)


@pytest.mark.parametrize("params", [{}, None, [], [None, {"custom_params": None}]])
def test_good_body_of_generate_passes(params):
    """Red if /generate refuses what has no wrong option of ours."""
    assert check_generate_body(None, {"sampling_params": params}) is None


def test_bad_body_of_generate_is_refused():
    """Red if a streamed request, or one of a batch, is not checked before it begins."""
    bad = {"custom_params": {"parse_mode": "loud"}}
    for params in (bad, [{}, bad]):
        message = check_generate_body(None, {"sampling_params": params})
        assert message.startswith("custom_params.parse_mode is 'loud'; expected one of")
    assert check_generate_body("theirs", {"sampling_params": bad}) == "theirs"


def test_limit_of_ollama_loses_its_fraction():
    """Red if `num_predict: 5.5` reaches SGLang as a float, or a text as a number."""
    assert [check_limit(n) for n in (None, 7, 5.5)] == [None, 7, 5]
    for bad in ("7", math.nan, math.inf, [7]):
        with pytest.raises(ValueError, match="max_new_tokens is .*; expected a number"):
            check_limit(bad)
