"""A step that ends the server says whose requests were in it."""

import logging
from types import SimpleNamespace

import pytest

from sglang_parse.integration.last_words import MAX_IDS, last_words


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
