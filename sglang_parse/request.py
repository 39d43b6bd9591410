"""Per-request options (`custom_params`) and the mode a request is served in."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from sglang_parse.config import (
    KEEP_RULES,
    MAX_THRESHOLD,
    MODES,
    ParseConfig,
    check_choice,
    check_count,
    check_flag,
    check_number,
    check_question,
    check_recover,
    check_segmenter,
    check_text,
    shown,
)

PREFIX = "parse_"
# Segments to recover where the target writes the rest of the response.
REST = sys.maxsize


# Longest client text. A token is several characters; contexts are shorter than this.
MAX_CLIENT_CHARS = 200_000
MAX_VERIFY_SEGMENTS = 256


def _check_segments(value: Any, field: str) -> str | tuple[str, ...]:
    if not isinstance(value, list):
        return check_text(value, field, MAX_CLIENT_CHARS)
    if not 1 <= len(value) <= MAX_VERIFY_SEGMENTS:
        raise ValueError(
            f"{field} has {len(value)} segments; expected 1 to {MAX_VERIFY_SEGMENTS}, "
            "or one text."
        )
    parts = [
        check_text(v, f"{field}[{i}]", MAX_CLIENT_CHARS) for i, v in enumerate(value)
    ]
    if sum(map(len, parts)) > MAX_CLIENT_CHARS:
        raise ValueError(
            f"{field} has {sum(map(len, parts))} characters; expected at most "
            f"{MAX_CLIENT_CHARS}."
        )
    return tuple(parts)


_CHECKS: dict[str, Callable[[Any, str], Any]] = {
    "parse_mode": lambda v, f: check_choice(v, f, MODES),
    "parse_threshold": lambda v, f: check_number(v, f, 0.0, MAX_THRESHOLD),
    "parse_keep_rule": lambda v, f: check_choice(v, f, KEEP_RULES),
    "parse_segmenter": check_segmenter,
    "parse_judge_every": lambda v, f: check_count(v, f, 0, 1024),
    "parse_window": lambda v, f: check_count(v, f, 0, 1 << 20),
    "parse_judge_suffix": check_question,
    "parse_exact_tail": check_flag,
    "parse_recover_segments": check_recover,
    "parse_compose": check_flag,
    "parse_report": check_flag,
    "parse_draft": lambda v, f: check_text(v, f, MAX_CLIENT_CHARS),
    "parse_verify": _check_segments,
    "parse_prediction": lambda v, f: check_text(v, f, MAX_CLIENT_CHARS),
}
OPTIONS = frozenset(_CHECKS)
# Each is a client's text, used in its own way.
CLIENT_TEXTS = ("parse_draft", "parse_verify", "parse_prediction")


def check_custom_params(custom_params: Any, max_new_tokens: Any = 1) -> dict[str, Any]:
    """The `parse_*` entries of a request's custom_params, checked.

    max_new_tokens: the request's own, None where it sets none. Raises ValueError
    naming the field, its value and what is allowed. Entries of other users of
    custom_params pass untouched.
    """
    if not isinstance(custom_params, Mapping):
        return {}
    options = {}
    for key, value in custom_params.items():
        if not isinstance(key, str) or not key.startswith(PREFIX):
            continue
        if key not in _CHECKS:
            raise ValueError(
                f"custom_params.{key[:60]} is {shown(value)} and no PARSE option; "
                f"expected one of "
                f"{', '.join(_CHECKS)}."
            )
        options[key] = _CHECKS[key](value, f"custom_params.{key}")
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
    return options


def check_sampling_params(result: Any, sampling_params: Any, *_: Any) -> Any:
    """AFTER hook on SamplingParams.verify: its ValueError becomes HTTP 400."""
    params = sampling_params
    params.max_new_tokens = check_limit(getattr(params, "max_new_tokens", 1))
    check_custom_params(
        getattr(params, "custom_params", None), getattr(params, "max_new_tokens", 1)
    )
    return result


def check_limit(max_new_tokens: Any) -> int | None:
    """A limit that counts tokens: Ollama's `num_predict` comes as it was sent, and
    Ollama itself drops a fraction. Raises ValueError."""
    if max_new_tokens is None or isinstance(max_new_tokens, int):
        return max_new_tokens
    if isinstance(max_new_tokens, float) and math.isfinite(max_new_tokens):
        return int(max_new_tokens)
    raise ValueError(
        f"max_new_tokens is {shown(max_new_tokens)}; expected a number of tokens "
        "(max_tokens, num_predict)."
    )


def check_generate_body(result: Any, body: Any, *_: Any) -> Any:
    """AFTER hook on generate_contract_error: HTTP 400 before a stream begins.

    body: parsed JSON of `/generate`; a batch has a list of sampling_params.
    """
    if result is not None or not isinstance(body, Mapping):
        return result
    params = body.get("sampling_params")
    try:
        for one in params if isinstance(params, list) else [params]:
            if isinstance(one, Mapping):
                limit = one.get("max_new_tokens")
                check_custom_params(one.get("custom_params"), limit)
    except ValueError as e:
        return str(e)
    return result


@dataclass(frozen=True)
class RequestOptions:
    """How one request is served: the server's settings with its own on top.

    compose: an EAGLE-3 head drafts for it too. fallback: why `mode` is not the mode
    asked for, or "". client_text: the text that came with the request, or its segments.
    verify_only: it is judged, nothing else.
    """

    mode: str
    threshold: float
    keep_rule: str
    segmenter: str
    judge_every: int
    window: int
    judge_suffix: str
    exact_tail: bool
    recover_segments: int | str
    compose: bool
    report: bool
    fallback: str
    client_text: str | tuple[str, ...] = ""
    verify_only: bool = False

    @property
    def recover_limit(self) -> int:
        """`recover_segments` as a number."""
        asked = self.recover_segments
        return REST if isinstance(asked, str) else asked

    @classmethod
    def of(
        cls,
        req: Any,
        config: ParseConfig,
        *,
        has_draft_model: bool = True,
        has_head: bool = False,
    ) -> RequestOptions:
        """Options of an SGLang Req; its custom_params passed verify() already."""
        asked = check_custom_params(req.sampling_params.custom_params)
        texts = [asked[key] for key in CLIENT_TEXTS if key in asked]
        verify_only = "parse_verify" in asked
        # A prediction is followed token by token unless asked otherwise.
        usual = "exact" if "parse_prediction" in asked else config.mode
        mode = "semantic" if verify_only else asked.get("parse_mode", usual)
        limit, reason = strongest_mode(req)
        compose = has_head and wants_head(req)
        if not has_draft_model and not texts and limit != "off":
            limit, reason = "exact" if compose else "off", "no_draft_model"
        if verify_only:
            limit = "semantic"
        fallback = reason if MODES.index(mode) < MODES.index(limit) else ""
        return cls(
            mode=limit if fallback else mode,
            threshold=asked.get("parse_threshold", config.threshold),
            keep_rule=asked.get("parse_keep_rule", config.keep_rule),
            segmenter=asked.get("parse_segmenter", config.segmenter),
            judge_every=asked.get("parse_judge_every", config.judge_every),
            window=asked.get("parse_window", config.window),
            judge_suffix=asked.get("parse_judge_suffix", config.judge_suffix),
            exact_tail=asked.get("parse_exact_tail", config.exact_tail),
            recover_segments=asked.get(
                "parse_recover_segments", config.recover_segments
            ),
            compose=compose,
            report=asked.get("parse_report", False) or verify_only,
            fallback=fallback,
            client_text=texts[0] if texts else "",
            verify_only=verify_only,
        )


def wants_head(req: Any) -> bool:
    """Whether a request lets an EAGLE-3 head draft for it, where there is one."""
    asked = req.sampling_params.custom_params
    if not isinstance(asked, Mapping):
        return True
    return asked.get("parse_compose", True) is not False


def wants_verdict_only(req: Any) -> bool:
    """Whether a request has its text judged, and nothing is generated."""
    asked = req.sampling_params.custom_params
    return isinstance(asked, Mapping) and "parse_verify" in asked


def strongest_mode(req: Any) -> tuple[str, str]:
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
        ("grammar", req.grammar is not None),
        # A draft model cannot read them.
        ("input_embeds", embeds is not None),
        ("logprobs", req.return_logprob),
        ("hidden_states", bool(req.return_hidden_states)),
        ("logit_bias", bool(params.logit_bias)),
    )
    for mode, reasons in (("off", off), ("exact", exact)):
        for reason, holds in reasons:
            if holds:
                return mode, reason
    return "semantic", ""
