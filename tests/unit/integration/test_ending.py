"""Requests that end with an error."""

from types import SimpleNamespace

import pytest

from sglang_parse.integration.ending import refuse
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
