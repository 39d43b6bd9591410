"""Requests that would end SGLang's scheduler are refused before they reach it."""

import time
from array import array
from types import SimpleNamespace

import pytest
from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_parse.shield.faults import drop_unknown_stops, problem_of
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
    )
    for one in fine:
        assert problem_of(one, VOCAB) == ""


@pytest.mark.parametrize(
    ("one", "told"),
    [
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
