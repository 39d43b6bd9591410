"""Requests that a stock server does not survive, at PARSE servers and at stock ones."""

import contextlib
import dataclasses
import json
import os

import pytest
import requests

from sglang_parse.demo.servers import ServerError
from sglang_parse.integration.shield import BREAKS, CHECKS, ENDS, FAILS
from tests.integration.conftest import COMMON
from tests.support.client import Server
from tests.support.warm_servers import WarmServer

TIMEOUT_S = 60
STOCK = "SGLANG_PARSE_TEST_STOCK"
IDS = {row.name: row for row in CHECKS}


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
    for row in CHECKS:
        if row.path != "/generate" or isinstance(row.body.get("text"), list):
            continue
        reply = send(parse, dataclasses.replace(row, body=row.body | {"stream": True}))
        told = reply.status_code == 400 or '"code":400' in reply.text
        assert told, (row.name, reply.text[:200])
    assert parse.is_alive()


@pytest.mark.parametrize("name", [row.name for row in CHECKS if row.effect == FAILS])
def test_the_stock_server_still_answers_with_500(target, name):
    """Red if SGLang has mended it: the row is to go."""
    assert send(target, IDS[name]).status_code in (500, 501)
    assert target.is_alive()


@pytest.mark.parametrize("name", [row.name for row in CHECKS if row.effect == BREAKS])
def test_the_stock_server_still_breaks_off(target, name):
    """Red if SGLang has mended it: the row is to go."""
    with pytest.raises(requests.RequestException):
        send(target, IDS[name])
    assert target.is_alive()


@pytest.mark.skipif(STOCK not in os.environ, reason=f"{STOCK} starts a server a case")
@pytest.mark.parametrize("name", [row.name for row in CHECKS if row.effect == ENDS])
def test_the_stock_server_still_ends(name, tmp_path):
    """Red if SGLang has mended it: the row is to go."""
    row = IDS[name]
    with WarmServer((*COMMON, *row.flags), "stock", tmp_path / "log") as process:
        with contextlib.suppress(requests.RequestException):
            send(Server(process.url), row)
        assert not Server(process.url).is_alive()
        with pytest.raises(ServerError):
            process.wait_ready()
