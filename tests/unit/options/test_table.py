"""The table of options: one row is all that an option needs."""

import dataclasses
import re
from dataclasses import dataclass

import pytest

from sglang_parse.options.kinds import SWITCH, whole
from sglang_parse.options.request import (
    REQUEST_TABLE,
    RequestOptions,
)
from sglang_parse.options.server import ParseConfig
from sglang_parse.options.table import (
    GROUPS,
    RequestOnlyOptions,
    grouped,
    option,
    options_of,
)
from tests.support.option_request import request

SERVER_TABLE = options_of(ParseConfig)
ROWS = [*SERVER_TABLE, *options_of(RequestOnlyOptions)]


@dataclass(frozen=True)
class CountingConfig(ParseConfig):
    """A server option that has the name of another option of requests."""

    hint: int = option(3, whole(0, 9), "A number.")


@dataclass(frozen=True)
class HintedRequest(RequestOptions):
    """The request option of that name."""

    hint: bool = option(True, SWITCH, "Yes or no.")


def test_every_option_stands_in_one_group_and_ten_come_first():
    """Red if --help or the documentation loses an option, or shows one twice."""
    table = options_of(ParseConfig)
    shown = [row for rows in grouped(table).values() for row in rows]
    assert sorted(map(id, shown)) == sorted(map(id, table))
    assert len(grouped(table)["most used"]) == 10
    assert set(sum(GROUPS.values(), ())) <= {row.name for row in table}


def test_options_of_one_name_are_kept_apart():
    """Red if a request takes the server's value of another option, as of `compose`."""
    config = CountingConfig(hint=7)
    assert HintedRequest.of(request({}), config).hint is True
    assert HintedRequest.of(request({"parse_hint": False}), config).hint is False


def test_every_field_of_the_settings_is_a_row():
    """Red if a setting has no flag because it was declared beside the table."""
    assert [f.name for f in dataclasses.fields(ParseConfig)] == [
        row.name for row in SERVER_TABLE
    ]
    beside = {f.name for f in dataclasses.fields(RequestOptions)} - {
        row.name for row in REQUEST_TABLE
    }
    assert beside == {"fallback"}


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_default_passes_its_own_check(row):
    """Red if a default is outside its own range; "" stands for no text."""
    if row.default != "":
        assert row.kind.check(row.default, "field") is not None


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_help_is_sentences(row):
    """Red if a help text is a fragment, or has a bracket or backtick left open."""
    assert re.fullmatch(r"[A-Z`].*\.", row.help)
    assert row.help.count("`") % 2 == 0
    assert row.help.count("(") == row.help.count(")")


def test_names_keywords_and_fields_are_unique():
    """Red if one option hides another."""
    keywords = [row.keyword for row in REQUEST_TABLE if row.keyword]
    assert len(set(keywords)) == len(keywords)
    for table in (SERVER_TABLE, REQUEST_TABLE):
        assert len({row.name for row in table}) == len(table)
