"""Requests that would end SGLang's scheduler are refused before they reach it."""

import time
from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import SessionParams
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_parse.shield.faults import (
    drop_unknown_stops,
    problem_of,
    problem_of_input,
    problem_of_update,
)
from tests.support.hostile_requests import _nested

VOCAB = 640
DEEP = _nested(200)


def tokenized(ids=(5, 6), params=None, **fields):
    """A request that is fine, with changes."""
    return SimpleNamespace(
        **{
            "input_ids": None if ids is None else array("q", ids),
            "input_embeds": None,
            "session_params": None,
            "return_logprob": False,
            "logprob_start_len": -1,
            "top_logprobs_num": 0,
            "custom_logit_processor": None,
            "positional_embed_overrides": None,
            "sampling_params": SamplingParams(**params or {}),
            **fields,
        }
    )


def test_ordinary_requests_pass():
    """Red if the shield refuses what SGLang serves."""
    fine = (
        tokenized(),
        tokenized([0, VOCAB - 1]),
        tokenized(return_logprob=True, top_logprobs_num=VOCAB, logprob_start_len=0),
        tokenized(return_logprob=True, top_logprobs_num=None, logprob_start_len=None),
        tokenized(top_logprobs_num=10**6),  # no logprobs are asked for
        tokenized(params={"stop_token_ids": [-1, 10**6]}),
        tokenized(params={"stop_token_ids": [3], "min_new_tokens": 2}),
        tokenized(params={"custom_params": {"a": [{"b": 1}], "c": "text"}}),
        tokenized(params={"temperature": 100.0, "top_k": -1}),
        tokenized(params={"repetition_penalty": 0.1, "logit_bias": {"7": -100}}),
        tokenized(None, input_embeds=[[0.1]]),
        tokenized([], session_params=SimpleNamespace(id="a")),
        tokenized(custom_logit_processor=DisallowedTokensLogitsProcessor.to_str()),
        tokenized(positional_embed_overrides=SimpleNamespace(reconstruct=None)),
        tokenized(params={"regex": "(Yes|No)"}),
        tokenized(params=expressions(r"\d+\.", "(a|b)*c", "(?P<n>x)(?P=n)")),
        scored(20, 13_000),
        scored(600, 13_000, logprob_start_len=-1),
        tokenized(session_params=session(id="a", replace=True, rid="r", offset=3)),
    )
    for one in fine:
        assert problem_of(one, VOCAB) == ""


def expressions(*texts):
    return {"stop_regex": list(texts)}


def scored(num, num_tokens, **fields):
    """A request for logprobs of its prompt."""
    asked = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": num}
    return tokenized([5] * num_tokens, **{**asked, **fields})


def session(**fields):
    return SessionParams(**fields)


@pytest.mark.parametrize(
    ("one", "told"),
    [
        *(
            (tokenized(params={"min_new_tokens": 8, name: "x"}), f"8 beside {name};")
            for name in ("json_schema", "regex", "ebnf", "structural_tag")
        ),
        (
            tokenized(params={"min_new_tokens": 1, "stop_token_ids": range(VOCAB)}),
            "stop_token_ids has 640 tokens beside min_new_tokens",
        ),
        (tokenized(params=expressions("a", r"(?<=(x)y")), "stop_regex is"),
        (scored(600, 2040), "600 logprobs of each of 2040 prompt tokens"),
        (
            scored(0, 2040, token_ids_logprob=[5] * 600),
            "600 logprobs of each of 2040 prompt tokens",
        ),
        (tokenized(session_params=session(id="a", replace=True)), "replace and no rid"),
        (tokenized(session_params=session(id=["a"])), "session_params.id is ['a']"),
        (tokenized(session_params=session(id="a", rid=3)), "session_params.rid is 3"),
        (
            tokenized(session_params=session(id="a", offset="3")),
            "session_params.offset is '3'",
        ),
        (tokenized([]), "no tokens"),
        (tokenized(return_hidden_states=[]), "return_hidden_states is []"),
        (tokenized(return_logprob=True, top_logprobs_num=[2]), "top_logprobs_num"),
        (tokenized([5, VOCAB]), f"token id {VOCAB}; expected 0 to {VOCAB - 1}"),
        (tokenized([5, -1]), "token id -1"),
        (tokenized(return_logprob=True, top_logprobs_num=VOCAB + 1), "top_logprobs"),
        (tokenized(logprob_start_len=-2), "logprob_start_len is -2"),
        (
            tokenized(params={"stop_token_ids": [-1], "min_new_tokens": 1}),
            "stop_token_ids has -1",
        ),
        (
            tokenized(params={"stop_token_ids": [VOCAB], "min_new_tokens": 1}),
            f"stop_token_ids has {VOCAB}",
        ),
        (tokenized(params={"temperature": 1e308}), "temperature is 1e+308"),
        (tokenized(params={"repetition_penalty": 1e-300}), "penalty is 1e-300"),
        (tokenized(params={"logit_bias": {"7": 1e308}}), "token '7' is 1e+308"),
        (tokenized(params={"logit_bias": {"7": float("nan")}}), "token '7' is nan"),
        (tokenized(params={"logit_bias": {"7": "x"}}), "token '7' is 'x'"),
        (tokenized(params={"top_k": 2**40}), "top_k is 1099511627776"),
        (tokenized(params={"custom_params": {"x": [{"y": DEEP}]}}), "nested deeper"),
        (tokenized(custom_logit_processor="zzz"), "custom_logit_processor"),
        (tokenized(custom_logit_processor="{}"), "custom_logit_processor"),
        (tokenized(custom_logit_processor="[1]"), "custom_logit_processor"),
        (tokenized(custom_logit_processor='{"callable": "80"}'), "custom_logit"),
        (tokenized(positional_embed_overrides=[1]), "positional_embed_overrides"),
    ],
)
def test_hostile_requests_are_told(one, told):
    """Red if a request that ends the scheduler passes."""
    assert told in problem_of(one, VOCAB)


@pytest.mark.parametrize("num_tokens", [20, 6000])
def test_checks_take_less_than_50_us(num_tokens):
    """Red if the checks of one request cost more than 50 us."""
    one = tokenized([5] * num_tokens, return_logprob=True)
    best = min(_seconds(one) for _ in range(200))
    assert best < 50e-6


def _seconds(one):
    started = time.perf_counter()
    problem_of(one, VOCAB)
    return time.perf_counter() - started


def test_stop_tokens_of_no_vocabulary_are_left_out():
    """Red if another request's min_new_tokens makes the scheduler read them, or if one
    that may stand is lost."""
    for asked, left in (
        ([3, VOCAB, -1], {3}),
        ([VOCAB], None),
        ([0, VOCAB - 1], {0, VOCAB - 1}),
        (None, None),
    ):
        params = SamplingParams(stop_token_ids=asked)
        drop_unknown_stops(params, VOCAB)
        assert params.stop_token_ids == left


@pytest.mark.parametrize(
    ("labels", "metrics", "told"),
    [
        (None, True, ""),
        ({"tenant": "a"}, True, ""),
        ({"a": "b"}, False, ""),
        ({"tenant": "a", "a": "b"}, True, "custom_labels is {'a': 'b', 'tenant': 'a'}"),
        ("ab", True, "custom_labels is 'ab'"),
        ([["tenant", "a"]], True, "custom_labels is [['tenant', 'a']]"),
    ],
)
def test_labels_that_no_metric_has_are_refused(labels, metrics, told):
    """Red if a label ends the HTTP process, or one that the owner allows is refused."""
    args = SimpleNamespace(
        enable_metrics=metrics, tokenizer_metrics_allowed_custom_labels=["tenant"]
    )
    found = problem_of_input(SimpleNamespace(custom_labels=labels), args)
    assert told in found and bool(told) == bool(found)


@pytest.mark.parametrize(
    ("body", "told"),
    [
        (b'{"load_format": "zzz"}', "load_format is 'zzz'; expected one of auto, pt,"),
        (b'{"load_format": ["auto"]}', "load_format is ['auto']"),
        *((body, "") for body in (b'{"load_format": "auto"}', b"{}", b"[]", b"{")),
        (b'{"load_format": null}', ""),
    ],
)
def test_formats_that_no_loader_knows_are_refused(body, told):
    """Red if an unknown format ends the scheduler, or a known one is refused."""
    found = problem_of_update(body)
    assert told in found and bool(told) == bool(found)
