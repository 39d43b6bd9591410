"""How far a request may go: one rule for each option that a request has.

With `--speculative-parse-client-options safe` a request may be stricter than the server
and never looser. Rules compare its values with the server's. They bind requests that
are answered in `semantic` mode: elsewhere every token is the target's own, and
`parse_verify` generates nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from sglang_parse.options.server import ParseConfig
from sglang_parse.options.table import (
    CLIENT_OPTIONS,
    KEEP_RULES,
    REQUEST_PREFIX,
    flag_name,
)
from sglang_parse.options.validation import RECOVER_ALL, shown

SAFE, NONE, ALL = CLIENT_OPTIONS
FLAG = flag_name("client_options")
# What is expected of a value that is too loose; "" for one that is not.
Rule = Callable[[Any, ParseConfig], str]
# Servers with adaptive windows judge every third boundary at least (policy/window.py).
RAREST_ADAPTIVE = 3


def mode_asked(asked: Mapping[str, Any], usual: str) -> str:
    """The mode that a request asks for: a prediction is followed token by token unless
    it says otherwise. usual: the server's mode."""
    return str(asked.get("mode", "exact" if "prediction" in asked else usual))


def check_limits(asked: Mapping[str, Any], config: ParseConfig) -> None:
    """Raise ValueError for the first option that this server does not let a request
    set so.

    asked: the request's options by name, checked.
    """
    if config.client_options == ALL:
        return
    if config.client_options == NONE:
        for name, value in asked.items():
            raise _refusal(name, value, "no PARSE option in a request", config)
    if "verify" in asked or mode_asked(asked, config.mode) != "semantic":
        return
    for name, value in asked.items():
        if expected := RULES[name](value, config):
            raise _refusal(name, value, expected, config)


def _refusal(name: str, value: Any, expected: str, config: ParseConfig) -> ValueError:
    return ValueError(
        f"custom_params.{REQUEST_PREFIX}{name} is {shown(value)}; expected {expected}, "
        f"because this server runs with {FLAG} {config.client_options}."
    )


def _any(value: Any, config: ParseConfig) -> str:
    """Changes no answer, or makes it the target's own."""
    return ""


def _mode(value: Any, config: ParseConfig) -> str:
    if config.mode == "semantic":
        return ""
    return f"{config.mode} or stricter"


def _at_least(name: str) -> Rule:
    def rule(value: Any, config: ParseConfig) -> str:
        least = getattr(config, name)
        return "" if value >= least else f"{least:g} or more"

    return rule


def _own(name: str) -> Rule:
    """For values that have no order."""

    def rule(value: Any, config: ParseConfig) -> str:
        own = getattr(config, name)
        return "" if value == own else f"the server's own, {shown(own)}"

    return rule


def _keep_rule(value: Any, config: ParseConfig) -> str:
    own = config.keep_rule
    is_looser = KEEP_RULES.index(value) > KEEP_RULES.index(own)
    return f"{own!r}" if is_looser else ""


def _judge_every(value: Any, config: ParseConfig) -> str:
    own = config.judge_every
    rarest = value or (RAREST_ADAPTIVE if config.adaptive else 1)
    if value == own or rarest <= max(own, 1):
        return ""
    return f"at most {own}" if own else "0 or 1"


def _window(value: Any, config: ParseConfig) -> str:
    own = config.window
    return "" if not own or 0 < value <= own else f"1 to {own}"


def _exact_tail(value: Any, config: ParseConfig) -> str:
    return "" if value or not config.exact_tail else "true"


def _recover_segments(value: Any, config: ParseConfig) -> str:
    own = config.recover_segments
    if value in (own, RECOVER_ALL):
        return ""
    if own == RECOVER_ALL:
        return f"{own!r}"
    return "" if value > own else f"{own} or more"


def _judge(value: Any, config: ParseConfig) -> str:
    # A probe that nobody asks about may be wrong where the question is right.
    return "auto or suffix" if value == "probe" else ""


#: By option. An option without a rule fails `tests/unit/options/test_client_limits.py`.
RULES: dict[str, Rule] = {
    "mode": _mode,
    "threshold": _at_least("threshold"),
    "keep_rule": _keep_rule,
    "segmenter": _own("segmenter"),
    "judge_every": _judge_every,
    "window": _window,
    "judge_suffix": _own("judge_suffix"),
    "exact_tail": _exact_tail,
    "exact_head": _at_least("exact_head"),
    "recover_segments": _recover_segments,
    "judge": _judge,
    # The target's own token decides on what these drafters write.
    "compose": _any,
    "report": _any,
    "stream_tokens": _any,
    # Judged as the server judges any draft, by the rules above.
    "draft": _any,
    "prediction": _any,
    "verify": _any,
}
