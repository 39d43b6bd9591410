"""Per-request options (`custom_params`) and the mode a request is served in."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_parse.options.client_limits import check_limits, mode_asked
from sglang_parse.options.judge_names import QUESTION_JUDGE
from sglang_parse.options.server import ParseConfig
from sglang_parse.options.table import (
    MODES,
    REQUEST_PREFIX,
    Option,
    RequestOnlyOptions,
    SharedOptions,
    options_of,
)
from sglang_parse.options.validation import did_you_mean, shown

# Segments to recover where the target writes the rest of the response.
REST = sys.maxsize
# Each is a client's text, used in its own way.
CLIENT_TEXTS = ("parse_draft", "parse_verify", "parse_prediction")


@dataclass(frozen=True)
class RequestOptions(RequestOnlyOptions, SharedOptions):
    """How one request is served: the server's settings with its own on top.

    `mode` is the mode served, `compose` is false where the target has no head.
    """

    #: Why `mode` is not the mode asked for, or "".
    fallback: str = ""

    @property
    def recover_limit(self) -> int:
        """`recover_segments` as a number."""
        asked = self.recover_segments
        return REST if isinstance(asked, str) else asked

    @property
    def client_text(self) -> str | tuple[str, ...]:
        """The text that came with the request, or its segments; "" without one."""
        return self.draft or self.verify or self.prediction

    @property
    def verify_only(self) -> bool:
        """Whether the request's text is judged, and nothing else."""
        return bool(self.verify)

    @classmethod
    def of(
        cls,
        req: Any,
        config: ParseConfig,
        *,
        has_draft_model: bool = True,
        has_token_level: bool = False,
        no_verdicts: str = "",
    ) -> RequestOptions:
        """Options of an SGLang Req; its custom_params passed verify() already.

        no_verdicts: why the target can judge nothing, as reports say it, or "". Raises
        ValueError on a question where the server's judge asks none, and on a text to
        judge where nothing is judged.
        """
        table = options_of(cls)
        found = check_custom_params(req.sampling_params.custom_params, table=table)
        asked = {name.removeprefix(REQUEST_PREFIX): v for name, v in found.items()}
        _check_question(asked, config)
        if no_verdicts and "verify" in asked:
            raise ValueError(
                "custom_params.parse_verify asks for verdicts, which a target with "
                f"{no_verdicts.replace('_', ' ')} does not give; leave it out."
            )
        usual = _servers_values(config, table)
        compose = has_token_level and wants_token_level(req)
        mode, fallback = _served_mode(
            req,
            asked,
            config.mode,
            has_draft_model=has_draft_model,
            has_token_level=compose,
            no_verdicts=no_verdicts,
        )
        served = {"mode": mode, "fallback": fallback, "compose": compose}
        report = asked.get("report", False) or "verify" in asked
        return cls(**{**usual, **asked, **served, "report": report})


REQUEST_TABLE = options_of(RequestOptions)
OPTIONS = frozenset(row.request_field for row in REQUEST_TABLE)


def check_custom_params(
    custom_params: Any,
    max_new_tokens: Any = 1,
    table: Sequence[Option] = REQUEST_TABLE,
    config: ParseConfig | None = None,
) -> dict[str, Any]:
    """The `parse_*` entries of a request's custom_params, checked.

    max_new_tokens: the request's own, None where it sets none. config: of the server
    that bounds what a request may set, None where no server is known. Raises ValueError
    naming the field, its value and what is allowed. Entries of other users of
    custom_params pass untouched.
    """
    if not isinstance(custom_params, Mapping):
        return {}
    options = {
        key: _checked(key, value, table)
        for key, value in custom_params.items()
        if isinstance(key, str) and key.startswith(REQUEST_PREFIX)
    }
    texts = [key for key in CLIENT_TEXTS if key in options]
    if len(texts) > 1:
        raise ValueError(
            f"custom_params has {' and '.join(texts)}; expected at most one of "
            f"{', '.join(CLIENT_TEXTS)}."
        )
    if "parse_verify" in options and max_new_tokens != 1:
        raise ValueError(
            f"max_new_tokens is {shown(max_new_tokens)}; expected 1 (max_tokens at the "
            "OpenAI endpoints) with custom_params.parse_verify, which judges and "
            "generates nothing."
        )
    if config is not None:
        asked = {key.removeprefix(REQUEST_PREFIX): v for key, v in options.items()}
        check_limits(asked, config)
    return options


def wants_token_level(req: Any) -> bool:
    """Whether a request lets drafters of tokens draft for it, where there are any."""
    asked = req.sampling_params.custom_params
    if not isinstance(asked, Mapping):
        return True
    return asked.get("parse_compose", True) is not False


def wants_verdict_only(req: Any) -> bool:
    """Whether a request has its text judged, and nothing is generated."""
    asked = req.sampling_params.custom_params
    return isinstance(asked, Mapping) and "parse_verify" in asked


def strongest_mode(req: Any, no_verdicts: str = "") -> tuple[str, str]:
    """The most speculative mode in which this request is served right, and why.

    What reads or changes the target's distribution at single tokens has no
    counterpart in a judged prefix: `exact` where one row of the pass is one step of
    the target, `off` (one token a round) where a step depends on the tokens before it.
    """
    params = req.sampling_params
    embeds = req.input_embeds or req.positional_embed_overrides
    off = (
        ("custom_logit_processor", bool(req.custom_logit_processor)),
        ("frequency_penalty", params.frequency_penalty != 0),
        ("presence_penalty", params.presence_penalty != 0),
        ("repetition_penalty", params.repetition_penalty != 1),
        ("min_new_tokens", params.min_new_tokens > 0),
    )
    exact = (
        (no_verdicts, bool(no_verdicts)),
        ("grammar", req.grammar is not None),
        # A draft model cannot read them.
        ("input_embeds", embeds is not None),
        ("multimodal_input", getattr(req, "multimodal_inputs", None) is not None),
        ("logprobs", req.return_logprob),
        ("hidden_states", bool(req.return_hidden_states)),
        ("logit_bias", bool(params.logit_bias)),
    )
    for mode, reasons in (("off", off), ("exact", exact)):
        for reason, holds in reasons:
            if holds:
                return mode, reason
    return "semantic", ""


def _servers_values(config: ParseConfig, table: Sequence[Option]) -> dict[str, Any]:
    """The server's settings by name, of the rows that a request may set too.

    Rows are compared, not names: `compose` is one option here and another there.
    """
    servers = {row.name: row for row in options_of(type(config))}
    return {
        row.name: getattr(config, row.name)
        for row in table
        if servers.get(row.name) == row
    }


def _check_question(asked: Mapping[str, Any], config: ParseConfig) -> None:
    if "judge_suffix" in asked and config.judge != QUESTION_JUDGE:
        raise ValueError(
            f"custom_params.parse_judge_suffix is {shown(asked['judge_suffix'])} and "
            f"this server's judge is {config.judge!r}, which takes no question; leave "
            "the field out."
        )


def _checked(key: str, value: Any, table: Sequence[Option]) -> Any:
    for row in table:
        if row.request_field == key:
            return row.kind.check(value, f"custom_params.{key}")
    known = [row.request_field for row in table]
    raise ValueError(
        f"custom_params.{key[:60]} is {shown(value)} and no PARSE option"
        f"{did_you_mean(key, known)}; expected one of {', '.join(known)}."
    )


def _served_mode(
    req: Any,
    asked: Mapping[str, Any],
    usual: str,
    *,
    has_draft_model: bool,
    has_token_level: bool,
    no_verdicts: str,
) -> tuple[str, str]:
    """The mode that a request is served in, and why it is not the one asked for.

    asked: its own options by name. usual: the server's mode.
    """
    if "verify" in asked:
        return "semantic", ""
    mode = mode_asked(asked, usual)
    limit, reason = strongest_mode(req, no_verdicts)
    has_text = "draft" in asked or "prediction" in asked
    if not has_draft_model and not has_text and limit != "off":
        limit, reason = "exact" if has_token_level else "off", "no_draft_model"
    if MODES.index(mode) < MODES.index(limit):
        return limit, reason
    return mode, ""
