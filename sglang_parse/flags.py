"""The `--speculative-parse-*` flags and their way to the worker.

Flag values ride on the ServerArgs record as `_parse_options` (not a field), which is
pickled to the scheduler processes (sglang/srt/server_args.py, `__reduce__`).
"""

from __future__ import annotations

import argparse
from typing import Any

from sglang_parse.config import (
    COMPOSITIONS,
    CONFIG_ENV,
    KEEP_RULES,
    MODES,
    RECOVER_ALL,
    SEGMENTERS,
    VERIFY_ROUTES,
    ParseConfig,
    flag_name,
)

OPTIONS_ATTRIBUTE = "_parse_options"
CONFIG_DEST = "speculative_parse_config"


def add_cli_args(result: Any, parser: argparse.ArgumentParser) -> None:
    """AFTER hook on ServerArgs.add_cli_args: define our flags with their defaults."""
    default = ParseConfig()
    group = parser.add_argument_group("PARSE (--speculative-algorithm PARSE)")

    def add(field: str, text: str, **kwargs: Any) -> None:
        group.add_argument(
            flag_name(field),
            dest=_dest(field),
            default=None,
            help=f"{text} Default: {_shown_default(default, field)}.",
            **kwargs,
        )

    add(
        "window",
        "Draft tokens a round; 0 drafts the whole response.",
        type=int,
        metavar="N",
    )
    add(
        "max_segments",
        "Prefixes judged per request in one pass.",
        type=int,
        metavar="N",
    )
    add(
        "segmenter",
        f"Where the draft is cut: {', '.join(SEGMENTERS)} or fixed:N.",
        type=str,
        metavar="NAME",
    )
    add(
        "judge_every",
        "Judge at every N-th boundary; 0 judges at each, or up to every third where "
        "windows adapt and suffixes are measured to cost more than they save.",
        type=int,
        metavar="N",
    )
    add("judge_suffix", "The question asked after each prefix.", type=str)
    add(
        "verdict_tokens",
        "Pairs of single-token answers, yes/no, separated by commas.",
        type=str,
    )
    add(
        "threshold",
        "A prefix is valid when P(yes)/(P(yes)+P(no)) reaches this; above 1 none is.",
        type=float,
    )
    add(
        "keep_rule",
        f"{KEEP_RULES[0]} keeps up to the last boundary before the first failing "
        f"verdict; {KEEP_RULES[1]} up to the last passing one.",
        type=str,
        metavar="RULE",
    )
    add(
        "mode",
        f"How requests are served unless they ask otherwise: {', '.join(MODES)}.",
        type=str,
    )
    add(
        "exact_tail",
        "After the cut, keep draft tokens that equal the target's own choice.",
        action=argparse.BooleanOptionalAction,
    )
    add(
        "recover_segments",
        "Segments the target writes itself after a rejection, before verdicts count "
        f"again; {RECOVER_ALL}: the rest of the response, as in the paper.",
        type=_count_or_word,
        metavar="N",
    )
    add(
        "adaptive",
        "Windows shrink after a rejection and grow back; drafting pauses where plain "
        "decoding is measured to be faster.",
        action=argparse.BooleanOptionalAction,
    )
    add(
        "max_round_ms",
        "Milliseconds a round may take, which bounds how long a new request waits for "
        "its prefill; with N requests running or waiting it is divided by "
        "1 + (N - 1) / 5; needs the adaptive windows; 0 for no bound.",
        type=int,
        metavar="MS",
    )
    add(
        "verify_route",
        "How the prefixes of a pass are put to the attention backend: "
        f"{', '.join(VERIFY_ROUTES)}; a mask over one row per request, or one virtual "
        "sequence per prefix.",
        type=str,
        metavar="ROUTE",
    )
    add(
        "compose",
        f"Token-level speculation to compose with: {', '.join(COMPOSITIONS)}; its head "
        "drafts where the target is followed token by token.",
        type=str,
        metavar="NAME",
    )
    add(
        "eagle_model_path",
        "The target's EAGLE-3 head, a local path or a Hugging Face name.",
        type=str,
        metavar="PATH",
    )
    add(
        "eagle_steps",
        "Tokens the EAGLE-3 head drafts at a time.",
        type=int,
        metavar="N",
    )
    group.add_argument(
        flag_name("config"),
        dest=CONFIG_DEST,
        default=None,
        metavar="FILE",
        help="JSON file with these settings (keys as the flags, without prefix and "
        f"with underscores); flags win. The variable {CONFIG_ENV} does the same.",
    )


def attach_options(result: Any, *args: Any, **kwargs: Any) -> Any:
    """AFTER hook on ServerArgs.from_cli_args(args): keep our flags on the record.

    Raises ValueError where one is given and another algorithm, or none, would serve.
    """
    namespace = kwargs.get("args") or args[-1]
    fields = ParseConfig.__dataclass_fields__
    options = {f: getattr(namespace, _dest(f), None) for f in fields}
    options[CONFIG_DEST] = getattr(namespace, CONFIG_DEST, None)
    given = [f for f, value in options.items() if value is not None]
    algorithm = getattr(namespace, "speculative_algorithm", None)
    if given and str(algorithm).upper() != "PARSE":
        name = given[0].removeprefix("speculative_parse_")
        raise ValueError(
            f"{flag_name(name)} is set but --speculative-algorithm is {algorithm}; "
            "expected --speculative-algorithm PARSE."
        )
    setattr(result, OPTIONS_ATTRIBUTE, options)
    return result


def config_from_server_args(server_args: Any) -> ParseConfig:
    """The server's ParseConfig. Raises ValueError naming the offending flag."""
    options = dict(getattr(server_args, OPTIONS_ATTRIBUTE, None) or {})
    path = options.pop(CONFIG_DEST, None)
    return ParseConfig.from_sources(options, path)


def _count_or_word(text: str) -> int | str:
    """What ParseConfig checks: a whole number, or any other word as it is."""
    return int(text) if text.isascii() and text.isdigit() else text


def _shown_default(config: ParseConfig, field: str) -> Any:
    value = getattr(config, field)
    return "none" if value == "" else value


def _dest(field: str) -> str:
    return "speculative_parse_" + field
