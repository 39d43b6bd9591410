"""Checks of custom_params, and the mode a request is served in."""

import copy
import math

import pytest

from sglang_parse.options.request import (
    RequestOptions,
    check_custom_params,
    strongest_mode,
)
from sglang_parse.options.server import ParseConfig
from sglang_parse.options.validation import CUT_MARK
from tests.support.option_request import request

GOOD = {
    "parse_mode": ["semantic", "exact", "off"],
    "parse_threshold": [0, 0.5, 1, 2.0],
    "parse_keep_rule": ["first-failure", "longest"],
    "parse_segmenter": ["step", "line", "paragraph", "sentence", "code", "fixed:7"],
    "parse_judge_every": [0, 1, 2, 1024],
    "parse_window": [0, 1, 256, 1 << 20],
    "parse_judge_suffix": ["Is it right?", "对吗？ Yes or No", "x" * 2000],
    "parse_exact_tail": [True, False],
    "parse_exact_head": [0, 4, 1 << 20],
    "parse_recover_segments": [0, 1, 1024, "all"],
    "parse_compose": [True, False],
    "parse_report": [True, False],
    "parse_stream_tokens": [0, 1, 8, 1 << 20],
}
# Values of the options that a server has too are in test_server.py.
BAD = {
    "parse_compose": ["eagle3", 1, 0, None],
    "parse_report": [1, "yes", None, {}],
    "parse_mode": ["Semantic", ["off"], {"mode": "off"}, "off "],
    "parse_threshold": [True, math.nan, -math.inf, 10**400, [0.5], {"value": 0.5}],
    "parse_segmenter": [
        "fixed:",
        "fixed:-1",
        "fixed:²",
        "fixed:" + "9" * 5000,
        ["step"],
    ],
    "parse_window": [10**30, math.nan, [8]],
    "parse_judge_suffix": ["x" * 2001, "a\ud800b"],
}
BAD_CASES = [(key, value) for key, values in BAD.items() for value in values]


@pytest.mark.parametrize(
    ("key", "value"), [(k, v) for k, values in GOOD.items() for v in values]
)
def test_good_value_passes(key, value):
    """Red if an allowed value is refused or changed."""
    assert check_custom_params({key: value}) == {key: value}


@pytest.mark.parametrize(("key", "value"), BAD_CASES, ids=repr)
def test_bad_value_names_field(key, value):
    """Red if a check is dropped, or raises anything but a ValueError with the field."""
    with pytest.raises(ValueError, match=rf"custom_params\.{key} is ") as error:
        check_custom_params({key: value})
    assert "expected" in str(error.value)
    assert len(str(error.value)) < 700


@pytest.mark.parametrize("name", ["parse_treshold", "parse_" + "x" * 100_000])
def test_unknown_option_lists_the_known_ones(name):
    """Red if a misspelt option is silently ignored, or a client can make the server log
    or return its megabytes."""
    with pytest.raises(ValueError, match="and no PARSE option.*; expected") as error:
        check_custom_params({name: 0.5})
    hint = "(did you mean parse_threshold?)"
    assert (hint in str(error.value)) == (name == "parse_treshold")
    assert all(key in str(error.value) for key in GOOD)
    assert len(str(error.value)) < 500


def test_marker_in_the_question_is_refused():
    """Red if a client's question can make the judge prompt impossible to build."""
    with pytest.raises(
        ValueError, match=r"custom_params\.parse_judge_suffix.*expected"
    ):
        check_custom_params({"parse_judge_suffix": f"Is it {CUT_MARK} right?"})


@pytest.mark.parametrize("value", ["x" * 10**6, ["x"] * 10**5, {"a": "b" * 10**6}])
@pytest.mark.parametrize("key", GOOD)
def test_bad_value_of_any_size_gives_a_short_message(key, value):
    """Red if a client can make the server log or return its megabytes."""
    with pytest.raises(ValueError, match=key) as error:
        check_custom_params({key: value})
    assert len(str(error.value)) < 700


@pytest.mark.parametrize(
    "custom_params",
    [
        {"thinking_budget": 3},
        {"parse": 1, "Parse_mode": "loud", "PARSE_MODE": 1},
        {"nested": {"parse_mode": "loud"}},
        {3: 4, None: 5},
        *(None, [], "parse_mode", 7, ["parse_mode"]),
    ],
)
def test_keys_of_others_are_left_alone(custom_params):
    """Red if PARSE refuses what another user of custom_params, or SGLang, accepts."""
    before = copy.copy(custom_params)
    assert check_custom_params(custom_params) == {}
    assert custom_params == before


ASKED = {
    "mode": "exact",
    "threshold": 0.7,
    "keep_rule": "longest",
    "segmenter": "fixed:3",
    "judge_every": 2,
    "window": 0,
    "judge_suffix": "Right?",
    "exact_tail": False,
    "exact_head": 3,
    "recover_segments": "all",
}


def test_options_default_to_the_server_config():
    """Red if a server setting does not reach requests that name none."""
    options = RequestOptions.of(request(), ParseConfig(**ASKED))
    assert options == RequestOptions(**ASKED, compose=False, report=False)


def test_options_of_the_request_win():
    """Red if an option is read from the server although the request names it."""
    asked = {**ASKED, "compose": False, "report": True}
    req = request({f"parse_{name}": value for name, value in asked.items()})
    config = ParseConfig(mode="off", threshold=0.9, window=5, judge_every=4)
    options = RequestOptions.of(req, config, has_token_level=True)
    assert options == RequestOptions(**asked, fallback="")


TEXTS = [
    ("parse_draft", "Step 1", "Step 1"),
    ("parse_prediction", "x = 1", "x = 1"),
    ("parse_verify", "Step 1", "Step 1"),
    ("parse_verify", ["a", "b"], ("a", "b")),
]


@pytest.mark.parametrize(("field", "given", "kept"), TEXTS)
def test_a_clients_text_arrives_in_its_way(field, given, kept):
    """Red if a text is lost, or is judged, followed or reported as another one is."""
    options = RequestOptions.of(request({field: given}), ParseConfig())
    judged = field == "parse_verify"
    assert options.client_text == kept
    assert (options.verify_only, options.report) == (judged, judged)
    assert options.mode == ("exact" if field == "parse_prediction" else "semantic")


def test_only_one_text_at_a_time():
    """Red if the server silently drops one of two texts."""
    two = {"parse_draft": "a", "parse_prediction": "b"}
    with pytest.raises(ValueError, match="parse_draft and parse_prediction; expected"):
        check_custom_params(two)


def test_a_text_is_judged_whatever_else_is_asked():
    """Red if `parse_verify` falls back where nothing is generated, or follows the
    server's mode."""
    req = request({"parse_verify": "text", "parse_mode": "off"}, return_logprob=True)
    options = RequestOptions.of(req, ParseConfig(mode="exact"), has_draft_model=False)
    assert (options.mode, options.fallback) == ("semantic", "")


def test_a_head_serves_where_there_is_no_draft_model():
    """Red if such a request is not served by EAGLE-3 itself, or against its will."""
    config = ParseConfig()
    alone = {"has_draft_model": False, "has_token_level": True}
    options = RequestOptions.of(request(), config, **alone)
    assert (options.mode, options.fallback) == ("exact", "no_draft_model")
    assert options.compose and options.recover_limit == 1
    options = RequestOptions.of(request({"parse_compose": False}), config, **alone)
    assert (options.mode, options.compose) == ("off", False)
    asked = request({"parse_recover_segments": "all"})
    assert RequestOptions.of(asked, config).recover_limit > 1 << 30


PLAIN = {
    "custom_logit_processor": {"custom_logit_processor": "processor"},
    "frequency_penalty": {"frequency_penalty": 0.1},
    "presence_penalty": {"presence_penalty": -0.1},
    "repetition_penalty": {"repetition_penalty": 1.1},
    "min_new_tokens": {"min_new_tokens": 1},
}
EXACT = {
    "grammar": {"grammar": object()},
    "logprobs": {"return_logprob": True},
    "hidden_states": {"return_hidden_states": True},
    "logit_bias": {"logit_bias": {"5": 1.0}},
    "input_embeds": {"input_embeds": [[0.0]]},
    "multimodal_input": {"multimodal_inputs": object()},
}
REASONS = PLAIN | EXACT


@pytest.mark.parametrize(("reason", "fields"), REASONS.items(), ids=REASONS.keys())
@pytest.mark.parametrize("asked", ["semantic", "exact", "off"])
def test_request_that_cannot_be_judged_is_served_right(reason, fields, asked):
    """Red if a row of the table is lost: the request would be answered wrongly."""
    options = RequestOptions.of(request({"parse_mode": asked}, **fields), ParseConfig())
    limit = "off" if reason in PLAIN else "exact"
    speed = ("semantic", "exact", "off").index
    if speed(asked) < speed(limit):
        assert (options.mode, options.fallback) == (limit, reason)
    else:
        assert (options.mode, options.fallback) == (asked, "")


def test_a_target_that_gives_no_verdicts_is_followed_token_by_token():
    """Red if a request is judged that cannot be, a report does not say why it was not,
    or a text to judge gets an answer."""
    why = {"no_verdicts": "sparse_attention"}
    for asked, served in (("semantic", "exact"), ("exact", "exact"), ("off", "off")):
        made = RequestOptions.of(request({"parse_mode": asked}), ParseConfig(), **why)
        assert made.mode == served
        assert made.fallback == ("sparse_attention" if asked == "semantic" else "")
    with pytest.raises(ValueError, match="parse_verify .* sparse attention .*leave it"):
        RequestOptions.of(request({"parse_verify": "text"}), ParseConfig(), **why)


def test_plain_decoding_wins_over_exact_mode():
    """Red if a request with two reasons takes the weaker consequence."""
    req = request(return_logprob=True, frequency_penalty=0.5)
    assert strongest_mode(req) == ("off", "frequency_penalty")


def test_plain_request_needs_no_fallback():
    """Red if ordinary requests are served without PARSE."""
    assert strongest_mode(request()) == ("semantic", "")
