"""Who is told to be at fault where a grammar refuses a token."""

from http import HTTPStatus
from types import SimpleNamespace

import pytest
from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_parse.integration import grammars

REFUSED = "Grammar accept_token failed: Tokens not accepted"


@pytest.fixture
def blame(monkeypatch):
    """A request's end, as SGLang has set it -> what it is on a PARSE server."""

    def run(message, serves=True):
        monkeypatch.setattr(grammars, "serves_parse", lambda: serves)
        status = HTTPStatus.INTERNAL_SERVER_ERROR
        end = message and FINISH_ABORT(message, status, "InternalServerError")
        req = SimpleNamespace(to_finish=end, output_ids=[5, 6])
        assert grammars.blame_grammar([5], None, req) == [5]
        return req.to_finish

    return run


def test_a_grammar_that_allows_nothing_is_the_request_s_fault(blame):
    """Red if it stays an error of the server, or the sentence loses its place."""
    end = blame(REFUSED)
    assert end.status_code == HTTPStatus.BAD_REQUEST
    assert "allows no token behind 2 tokens" in end.message
    assert "at the beginning" in grammars.told_of(0)


def test_other_errors_keep_their_status(blame):
    """Red if a fault of ours is told as the request's, or another server's end is."""
    assert blame("").__class__ is str
    fault = blame("PARSE failed on this request (KeyError)")
    assert fault.status_code == HTTPStatus.INTERNAL_SERVER_ERROR
    assert blame(REFUSED, serves=False).message == REFUSED
