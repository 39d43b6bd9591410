"""Options in a map that routers keep, put where SGLang looks for them.

sglang-router 0.3.2 writes each body anew from its own request types. A chat loses
custom_params, prediction and return_meta_info; a /generate loses custom_params; all
headers but a few are lost. `metadata` and `session_params` pass whole, and so do
responses. Source: https://github.com/sgl-project/sglang/issues/22740
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sglang_parse.options.table import REQUEST_PREFIX
from sglang_parse.options.validation import shown

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
GENERATE = "/generate"
OLLAMA = ("/api/chat", "/api/generate")
# Their request models have no custom_params, and drop them.
WITHOUT_OPTIONS = ("/v1/responses", "/v1/messages", *OLLAMA)
# The map by endpoint.
MAPS = {
    **dict.fromkeys((CHAT, COMPLETIONS, *WITHOUT_OPTIONS), "metadata"),
    **dict.fromkeys(OLLAMA, "options"),
    GENERATE: "session_params",
}
# Fields of the body that may stand in the map too.
FIELDS = {
    CHAT: ("prediction", "return_meta_info"),
    **dict.fromkeys((COMPLETIONS, *WITHOUT_OPTIONS), ("return_meta_info",)),
    GENERATE: (),
}
# Their values are text, whatever it looks like.
TEXTS = ("parse_draft", "parse_prediction", "parse_judge_suffix")


def take_carried(path: str, body: dict[str, Any]) -> None:
    """Move options from the endpoint's map to where they belong, in place.

    A map of strings (OpenAI's `metadata`) says numbers, true and lists as JSON. Raises
    ValueError where an option is given twice or has no place.
    """
    name = MAPS.get(path, "")
    given = body.get(name)
    if not isinstance(given, Mapping):
        return
    fields = FIELDS[path]
    found = {
        key: _value(key, value)
        for key, value in given.items()
        if isinstance(key, str) and (key.startswith(REQUEST_PREFIX) or key in fields)
    }
    if not found:
        return
    rest = {key: value for key, value in given.items() if key not in found}
    if rest:
        body[name] = rest
    else:
        body.pop(name)
    for key in fields:
        if key in found:
            _put(body, key, found.pop(key), name)
    if found:
        custom = dict(_custom_params(path, body))
        for key, value in found.items():
            _put(custom, key, value, name)
        _holder(path, body)["custom_params"] = custom


def _holder(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """The object that has `custom_params`."""
    if path != GENERATE:
        return body
    params = body.get("sampling_params") or {}
    if not isinstance(params, dict):
        raise ValueError(
            f"sampling_params is {shown(params)}; expected an object with parse_* in "
            "session_params."
        )
    body["sampling_params"] = params
    return params


def _custom_params(path: str, body: dict[str, Any]) -> Mapping[str, Any]:
    custom = _holder(path, body).get("custom_params") or {}
    if not isinstance(custom, Mapping):
        raise ValueError(f"custom_params is {shown(custom)}; expected an object.")
    return custom


def _put(place: dict[str, Any], key: str, value: Any, name: str) -> None:
    if place.get(key) is not None and place[key] != value:
        raise ValueError(f"{key} is given twice, once in {name}; expected one value.")
    place[key] = value


def _value(key: str, value: Any) -> Any:
    """What a map that may hold only strings means."""
    if not isinstance(value, str) or key in TEXTS:
        return value
    if key == "prediction":
        return {"type": "content", "content": value}
    try:
        read = json.loads(value)
    except (ValueError, RecursionError):
        return value
    if key == "parse_verify":
        return read if isinstance(read, list) else value
    return read if isinstance(read, (int, float)) else value
