"""Requests that end with an error, and steps that end the server."""

import logging
from types import SimpleNamespace

import pytest

from sglang_parse.plugin.ending import MAX_IDS, last_words, refuse
from sglang_parse.requests.refusal import bad_request, internal_error, try_again


@pytest.mark.parametrize(
    ("refusal", "status", "err_type"),
    [
        (bad_request("Too long."), 400, "BadRequestError"),
        (try_again("No room"), 503, "ServiceUnavailableError"),
        (internal_error(KeyError("x")), 500, "InternalServerError"),
    ],
)
def test_a_refusal_is_told_as_sglang_tells_its_own(refusal, status, err_type):
    """Red if a client gets another status than the engine chose, or no sentence."""
    req = SimpleNamespace()
    refuse(req, refusal)
    reason = req.to_finish.to_json()
    assert (reason["status_code"], reason["err_type"]) == (status, err_type)
    assert reason["message"] == str(refusal)


def test_an_error_of_ours_names_no_secret_of_the_server():
    """Red if the text of an exception goes out to a client."""
    assert "KeyError" in str(internal_error(KeyError("/home/x")))
    assert "/home/x" not in str(internal_error(KeyError("/home/x")))


def requests(*ids):
    return [SimpleNamespace(rid=rid, origin_input_text="secret") for rid in ids]


def test_a_step_that_raises_names_its_requests_in_one_line(caplog):
    """Red if the ids are missing, or if a client's id breaks the line."""
    with (
        caplog.at_level(logging.CRITICAL),
        pytest.raises(IndexError),
        last_words(requests("a1", "b\n2"), "round"),
    ):
        raise IndexError("secret")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.endswith("a round of 2 request(s) raised IndexError; ids 'a1', 'b\\n2'")
    assert "secret" not in line and "\n" not in line


def test_a_large_batch_is_cut(caplog):
    """Red if a line grows with the batch."""
    with pytest.raises(ValueError), last_words(requests(*"x" * 500), "round"):
        raise ValueError
    assert caplog.text.count("'x'") == MAX_IDS


def test_a_step_that_is_fine_says_nothing(caplog):
    """Red if every step is logged."""
    with last_words(requests("a"), "round"):
        pass
    assert not caplog.records
