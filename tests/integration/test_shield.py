"""Requests that a stock server does not survive, at PARSE servers and at stock ones."""

import contextlib
import dataclasses
import json
import os

import pytest
import requests

from sglang_parse.demo.servers import ServerError
from tests.integration.conftest import COMMON
from tests.support.client import Server
from tests.support.hostile_requests import BREAKS, ENDS, FAILS, REQUESTS
from tests.support.warm_servers import WarmServer

TIMEOUT_S = 60
STOCK = "SGLANG_PARSE_TEST_STOCK"
IDS = {row.name: row for row in REQUESTS}


def send(server, row):
    return requests.post(
        server.url + row.path,
        data=json.dumps(row.body),
        headers={"content-type": "application/json"},
        timeout=TIMEOUT_S,
    )


@pytest.mark.parametrize("name", IDS)
def test_parse_servers_answer_with_a_sentence(parse, name):
    """Red if a request of the table ends a PARSE server, or is answered with 500."""
    reply = send(parse, IDS[name])
    assert reply.status_code == 400, reply.text[:300]
    body = reply.json()
    error = body.get("error", body)
    message = error if isinstance(error, str) else error["message"]
    assert message.endswith(".") and "\n" not in message
    assert parse.is_alive()


def test_streams_are_told_too(parse):
    """Red if a stream breaks off where the request is at fault."""
    for row in REQUESTS:
        if row.path != "/generate" or isinstance(row.body.get("text"), list):
            continue
        reply = send(parse, dataclasses.replace(row, body=row.body | {"stream": True}))
        told = reply.status_code == 400 or '"code":400' in reply.text
        assert told, (row.name, reply.text[:200])
    assert parse.is_alive()


@pytest.mark.parametrize("name", [row.name for row in REQUESTS if row.effect == FAILS])
def test_the_stock_server_still_answers_with_500(target, name):
    """Red if SGLang has mended it: the row is to go."""
    assert send(target, IDS[name]).status_code in (500, 501)
    assert target.is_alive()


@pytest.mark.parametrize("name", [row.name for row in REQUESTS if row.effect == BREAKS])
def test_the_stock_server_still_breaks_off(target, name):
    """Red if SGLang has mended it: the row is to go."""
    with pytest.raises(requests.RequestException):
        send(target, IDS[name])
    assert target.is_alive()


@pytest.mark.skipif(STOCK not in os.environ, reason=f"{STOCK} starts a server a case")
@pytest.mark.parametrize("name", [row.name for row in REQUESTS if row.effect == ENDS])
def test_the_stock_server_still_ends(name, tmp_path):
    """Red if SGLang has mended it: the row is to go."""
    row = IDS[name]
    with WarmServer((*COMMON, *row.flags), "stock", tmp_path / "log") as process:
        with contextlib.suppress(requests.RequestException):
            send(Server(process.url), row)
        assert not Server(process.url).is_alive()
        with pytest.raises(ServerError):
            process.wait_ready()


def test_a_stock_server_serves_as_without_the_plugin(target):
    """Red if options of PARSE are checked, reported or counted there."""
    params = {"max_new_tokens": 4, "custom_params": {"parse_mode": "loud"}}
    for stream in (False, True):
        body = {"text": "1+2", "sampling_params": params, "stream": stream}
        reply = requests.post(f"{target.url}/generate", json=body, timeout=TIMEOUT_S)
        assert reply.status_code == 200 and '"parse"' not in reply.text
    chat = {
        "model": "m",
        "messages": [{"role": "user", "content": "1"}],
        "max_tokens": 4,
    }
    chat |= {"parse_mode": "loud", "prediction": 5}
    url = f"{target.url}/v1/chat/completions"
    assert requests.post(url, json=chat, timeout=TIMEOUT_S).status_code == 200
    info = requests.get(f"{target.url}/server_info", timeout=TIMEOUT_S).json()
    assert all("parse" not in state for state in info["internal_states"])
