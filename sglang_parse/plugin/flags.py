"""The `--speculative-parse-*` flags and their way to the worker.

Their values travel on the ServerArgs record as `_parse_options`. It is not a field, but
SGLang pickles it to the scheduler processes (server_args.py, `__reduce__`).
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from sglang_parse.options.server import CONFIG_ENV, CONFIG_FLAG, ParseConfig
from sglang_parse.options.table import (
    FLAG_PREFIX,
    Option,
    flag_name,
    grouped,
    options_of,
)
from sglang_parse.options.validation import suggest_flags
from sglang_parse.sgl.names import is_parse

OPTIONS_ATTRIBUTE = "_parse_options"
_DEST_PREFIX = "speculative_parse_"
CONFIG_DEST = _DEST_PREFIX + "config"
SERVER_TABLE = options_of(ParseConfig)


def add_cli_args(result: Any, parser: argparse.ArgumentParser) -> None:
    """AFTER hook on ServerArgs.add_cli_args: define our flags."""
    add_flags(parser, SERVER_TABLE)


def add_flags(parser: argparse.ArgumentParser, table: Sequence[Option]) -> None:
    """One flag per row, and one for the JSON file. A flag not given is None."""
    suggest_flags(parser, [row.flag for row in table], FLAG_PREFIX[:-3])
    groups = [
        (parser.add_argument_group(f"PARSE, {title}"), rows)
        for title, rows in grouped(table).items()
    ]
    for group, rows in groups:
        for row in rows:
            form: dict[str, Any] = {"type": _reader(row), "metavar": row.kind.metavar}
            if not row.kind.metavar:
                form = {"action": Switch}
            group.add_argument(
                row.flag, dest=_dest(row.name), default=None, help=_help(row), **form
            )
    groups[0][0].add_argument(
        CONFIG_FLAG,
        dest=CONFIG_DEST,
        default=None,
        metavar="FILE",
        help="JSON file with these settings. Its keys are the flags' names without the "
        "prefix and with underscores. Flags win over the file. The environment "
        f"variable {CONFIG_ENV} names such a file too.",
    )


def attach_options(result: Any, *args: Any, **kwargs: Any) -> Any:
    """AFTER hook on ServerArgs.from_cli_args(args): keep our flags on the record.

    Raises ValueError if one is given and the algorithm is not PARSE.
    """
    namespace = kwargs.get("args") or args[-1]
    options = flag_values(namespace, SERVER_TABLE)
    given = [name for name, value in options.items() if value is not None]
    algorithm = getattr(namespace, "speculative_algorithm", None)
    if given and not is_parse(algorithm):
        name = given[0].removeprefix(_DEST_PREFIX)
        raise ValueError(
            f"{flag_name(name)} is set but --speculative-algorithm is {algorithm}; "
            "expected --speculative-algorithm PARSE."
        )
    setattr(result, OPTIONS_ATTRIBUTE, options)
    return result


def flag_values(namespace: Any, table: Sequence[Option]) -> dict[str, Any]:
    """Parsed flags by option name, and the JSON file's path under CONFIG_DEST."""
    values = {row.name: getattr(namespace, _dest(row.name), None) for row in table}
    return {**values, CONFIG_DEST: getattr(namespace, CONFIG_DEST, None)}


def config_from_server_args(server_args: Any) -> ParseConfig:
    """The server's ParseConfig. Raises ValueError naming the offending flag."""
    options = dict(getattr(server_args, OPTIONS_ATTRIBUTE, None) or {})
    path = options.pop(CONFIG_DEST, None)
    return ParseConfig.from_sources(options, path)


class Switch(argparse.BooleanOptionalAction):
    """`--x`, `--no-x`, and `--x=true` or `false`. ParseConfig refuses other values."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.nargs, self.metavar = "?", ""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        is_on = not str(option_string).startswith("--no-")
        read = {None: is_on, "true": is_on, "false": not is_on}
        setattr(namespace, self.dest, read.get(values, values))


def _reader(row: Option) -> Callable[[str], Any]:
    """Reads a value, or leaves it to ParseConfig: before its own error, argparse prints
    all of SGLang's usage."""

    def read(text: str) -> Any:
        try:
            return row.kind.read(text)
        except ValueError:
            return text

    return read


def _help(row: Option) -> str:
    """The row as --help tells it: plain text, and no % for argparse to expand."""
    values = f" Values: {row.kind.values}." if row.kind.metavar else ""
    text = f"{row.help}{values} Default: {_shown_default(row)}."
    return text.replace("`", "").replace("%", "%%")


def _shown_default(row: Option) -> str:
    if isinstance(row.default, bool):
        return "on" if row.default else "off"
    if isinstance(row.default, str) and " " in row.default:
        return f'"{row.default}"'
    return str(row.default) or "none"


def _dest(name: str) -> str:
    return _DEST_PREFIX + name
