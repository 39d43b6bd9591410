"""Options in a map that a router keeps mean what they mean in custom_params."""

import pytest

from sglang_parse.plugin.carried import (
    CHAT,
    COMPLETIONS,
    GENERATE,
    take_carried,
)


def taken(path, body):
    take_carried(path, body)
    return body


def test_a_chats_metadata_is_read():
    """Red if an option of a chat is lost behind a router, or stays behind."""
    metadata = {
        "parse_mode": "exact",
        "parse_threshold": "0.5",
        "parse_report": "true",
        "parse_recover_segments": "all",
        "parse_segmenter": "fixed:3",
        "prediction": "[1]",
        "return_meta_info": "true",
        "user": "me",
    }
    assert taken(CHAT, {"metadata": metadata, "custom_params": {"x": 1}}) == {
        "metadata": {"user": "me"},
        "prediction": {"type": "content", "content": "[1]"},
        "return_meta_info": True,
        "custom_params": {
            "x": 1,
            "parse_mode": "exact",
            "parse_threshold": 0.5,
            "parse_report": True,
            "parse_recover_segments": "all",
            "parse_segmenter": "fixed:3",
        },
    }


@pytest.mark.parametrize("key", ["parse_draft", "parse_judge_suffix"])
def test_texts_stay_texts(key):
    """Red if a draft that looks like a number becomes one."""
    assert taken(COMPLETIONS, {"metadata": {key: "12"}}) == {
        "custom_params": {key: "12"}
    }


@pytest.mark.parametrize(
    ("given", "read"),
    [('["1", "2"]', ["1", "2"]), (["1"], ["1"]), ("12", "12"), ("a\n", "a\n")],
)
def test_verify_is_a_text_or_a_list(given, read):
    """Red if segments are judged as one text."""
    body = taken(CHAT, {"metadata": {"parse_verify": given}})
    assert body["custom_params"]["parse_verify"] == read


def test_generates_session_params_are_read():
    """Red if an option of /generate is lost behind a router, or SGLang sees it as a
    session."""
    body = {"text": "1", "session_params": {"parse_mode": "exact"}}
    assert taken(GENERATE, body) == {
        "text": "1",
        "sampling_params": {"custom_params": {"parse_mode": "exact"}},
    }
    session = {"id": "s", "parse_window": 7}
    body = {"session_params": session, "sampling_params": {"temperature": 0}}
    assert taken(GENERATE, body)["session_params"] == {"id": "s"}
    assert body["sampling_params"]["custom_params"] == {"parse_window": 7}


@pytest.mark.parametrize(
    "body",
    [
        {"metadata": None},
        {"metadata": {"user": "me", "prediction": "x"}},
        {"metadata": "parse_mode"},
        {"session_params": {"parse_mode": "exact"}},
    ],
)
def test_other_maps_are_left_alone(body):
    """Red if metadata of the user's own is changed."""
    assert taken(COMPLETIONS, dict(body)) == body


OFF, EXACT = {"parse_mode": "off"}, {"parse_mode": "exact"}


@pytest.mark.parametrize(
    ("path", "body", "told"),
    [
        (
            CHAT,
            {
                "metadata": {"parse_mode": "off"},
                "custom_params": {"parse_mode": "exact"},
            },
            "parse_mode is given twice, once in metadata",
        ),
        (
            CHAT,
            {"metadata": OFF, "custom_params": 3},
            "custom_params",
        ),
        (
            GENERATE,
            {"session_params": OFF, "sampling_params": [{}]},
            "sampling_params is",
        ),
    ],
)
def test_what_has_no_one_place_is_told(path, body, told):
    """Red if one of two values is chosen without a word."""
    with pytest.raises(ValueError, match=told):
        take_carried(path, body)
