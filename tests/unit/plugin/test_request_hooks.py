"""Requests before SGLang serves them, and what their outputs say."""

import asyncio
import math
from types import SimpleNamespace

import pytest
from sglang.srt.managers.io_struct import GenerateReqInput

from sglang_parse.options.request import check_custom_params
from sglang_parse.options.server import ParseConfig
from sglang_parse.plugin import request_hooks
from sglang_parse.plugin.request_hooks import (
    Exchange,
    check_limit,
    check_params,
    correct_accept_rate,
    current_exchange,
    follow_request,
)
from tests.support.fake_manager import FakeManager

CONFIG = ParseConfig()
MANAGER = FakeManager()
BAD = {"custom_params": {"parse_mode": "loud"}}


def outputs_of(obj, manager=MANAGER, outputs=({"meta_info": {}},)):
    """All outputs of a request."""

    async def sglangs():
        for output in outputs:
            yield output

    async def run():
        return [x async for x in follow_request(sglangs(), manager, obj)]

    return asyncio.run(run())


def test_outputs_pass():
    """Red if an output is lost or changed that says nothing of drafts."""
    outputs = ({"text": "a", "meta_info": {"id": 1}}, [{"text": "b"}, {"text": "c"}])
    assert outputs_of(SimpleNamespace(), outputs=outputs) == list(outputs)


@pytest.mark.parametrize(
    ("is_openai", "num", "kept"), [(True, 1, False), (True, 2, True), (False, 1, True)]
)
def test_openai_metadata_has_text_alone(is_openai, num, kept):
    """Red if clients that check the type of `metadata` fail, as pydantic-ai does."""
    spans = [{"version": str(k)} for k in range(num)]
    meta_info = {"weight_version": "0", "weight_versions": spans}
    token = current_exchange.set(Exchange(is_openai=is_openai))
    (output,) = outputs_of(SimpleNamespace(), outputs=[{"meta_info": meta_info}])
    current_exchange.reset(token)
    assert ("weight_versions" in output["meta_info"]) == kept


@pytest.mark.parametrize("params", [{}, None, [], [None, {"custom_params": None}]])
def test_requests_without_wrong_options_pass(params):
    """Red if a request is refused that has no wrong option of ours."""
    check_params(params, CONFIG)
    assert len(outputs_of(SimpleNamespace(sampling_params=params))) == 1


@pytest.mark.parametrize("params", [BAD, [{}, BAD]])
def test_a_wrong_option_is_a_value_error_of_the_outputs(params):
    """Red if a request, or one of a batch, reaches SGLang with a wrong option."""
    told = "^custom_params.parse_mode is 'loud'; expected one of"
    with pytest.raises(ValueError, match=told):
        outputs_of(SimpleNamespace(sampling_params=params))
    with pytest.raises(ValueError, match=told):
        check_params(params, CONFIG)


@pytest.mark.parametrize("limit", [None, 0, 2, 1 << 30])
def test_parse_verify_is_refused_with_a_response_length(limit):
    """Red if a request that generates nothing may ask for tokens, or for any number."""
    custom = {"parse_verify": "text"}
    assert check_custom_params(custom, 1) == custom
    with pytest.raises(ValueError, match=f"max_new_tokens is {limit}; expected 1"):
        check_params({"custom_params": custom, "max_new_tokens": limit}, CONFIG)


def test_limit_of_ollama_loses_its_fraction():
    """Red if `num_predict: 5.5` reaches SGLang as a float, or a text as a number."""
    params = {"max_new_tokens": 5.5}
    outputs_of(SimpleNamespace(sampling_params=params))
    assert params == {"max_new_tokens": 5}
    assert [check_limit(n) for n in (None, 7)] == [None, 7]
    for bad in ("7", math.nan, math.inf, [7]):
        with pytest.raises(ValueError, match="max_new_tokens is .*; expected a number"):
            check_limit(bad)


@pytest.mark.parametrize(
    ("capped", "proposed", "rate"), [({"spec_cap_length": 10.0}, 40, 0.75), ({}, 0, 0)]
)
def test_accept_rate_of_a_request_is_kept_over_drafted(capped, proposed, rate):
    """Red if a client reads a rate of rounds times a fixed length, or a request without
    drafts divides by zero."""
    meta_info = {"spec_num_proposed_drafts": 4, "spec_num_correct_drafts": 30}
    meta_info |= {"spec_verify_ct": 4, **capped}
    outputs_of(SimpleNamespace(), outputs=({"meta_info": meta_info},))
    assert meta_info["spec_num_proposed_drafts"] == proposed
    assert meta_info["spec_accept_rate"] == rate
    correct_accept_rate(meta_info)  # SGLang may show the same record again
    assert meta_info["spec_accept_rate"] == rate


PROVEN, UNPROVEN = "Qwen3VLForConditionalGeneration", "Gemma3ForConditionalGeneration"
IMAGE, VIDEO = {"image_data": ["image"]}, {"video_data": ["video"]}


@pytest.mark.parametrize(
    ("name", "media", "told"),
    [
        (UNPROVEN, {}, ""),
        (UNPROVEN, IMAGE, "The request has images.*Gemma3.*send text alone"),
        (PROVEN, IMAGE, ""),
        (PROVEN, IMAGE | VIDEO, "The request has video.*send text and images"),
    ],
)
@pytest.mark.parametrize("processor", [None, object()])
def test_unproven_media_for_a_multimodal_model_are_refused(
    name, media, told, processor, monkeypatch
):
    """Red if a request that no test has proven reaches the scheduler, or one that is
    proven does not."""
    monkeypatch.setattr(request_hooks, "reads_images_of", PROVEN.__eq__)
    manager = FakeManager(processor, name)
    obj = GenerateReqInput(text="Hi", sampling_params={}, **media)
    if told and processor:
        with pytest.raises(ValueError, match=told):
            outputs_of(obj, manager)
    else:
        assert len(outputs_of(obj, manager)) == 1
