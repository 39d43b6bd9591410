"""The settings of a running server."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Mapping
from typing import Any

from sglang_parse.options.server import ParseConfig


def server_info(url: str) -> dict[str, Any]:
    """`/server_info` of a server. Raises ValueError if nothing answers there."""
    try:
        with urllib.request.urlopen(url + "/server_info", timeout=30) as response:
            info: dict[str, Any] = json.load(response)
    except (urllib.error.URLError, OSError, ValueError) as e:
        raise ValueError(
            f"--url {url}: no SGLang server answers there ({e}); start one with "
            "--speculative-algorithm PARSE."
        ) from e
    return info


def parse_settings(info: Mapping[str, Any], url: str) -> dict[str, Any]:
    """The PARSE settings of a server. Raises ValueError if it serves without."""
    states = info.get("internal_states") or [{}]
    settings: dict[str, Any] | None = (states[0].get("parse") or {}).get("settings")
    if settings is None:
        raise ValueError(
            f"--url {url}: the server there does not serve with PARSE; start one with "
            "--speculative-algorithm PARSE."
        )
    return settings


# Settings that no request changes, and the one that lets requests change the others.
SERVERS_OWN = (
    "client_options",
    *("compose", "eagle_model_path", "eagle_steps", "drafters"),
    *("draft_url", "draft_url_model"),
)


def served_settings(info: Mapping[str, Any], url: str) -> dict[str, Any]:
    """The server's judge, and its other PARSE settings that are not the defaults.

    They are keys of the file for --speculative-parse-config, because the swept fields
    were measured on top of them and a threshold holds for one judge only. Raises
    ValueError if the server does not serve with PARSE, has no draft model, refuses
    loose settings, or streams answers in pieces, which this client does not read.
    """
    settings = parse_settings(info, url)
    if not info.get("speculative_draft_model_path"):
        raise ValueError(
            f"--url {url}: the server there has no draft model to judge; start it with "
            "--speculative-draft-model-path."
        )
    if settings.get("client_options", "all") != "all":
        raise ValueError(
            f"--url {url}: the server there lets no request be looser than itself; "
            "start it with --speculative-parse-client-options all."
        )
    if info.get("incremental_streaming_output"):
        raise ValueError(
            f"--url {url}: the server there streams answers in pieces; "
            "start it without --incremental-streaming-output."
        )
    usual = json.loads(json.dumps(vars(ParseConfig())))
    return {
        name: value
        for name, value in settings.items()
        if name == "judge" or (name not in SERVERS_OWN and value != usual.get(name))
    }
