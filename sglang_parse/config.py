"""ParseConfig: the frozen settings of PARSE, checked once.

Settings come from the `--speculative-parse-*` flags, from a JSON file
(`--speculative-parse-config` or the environment variable SGLANG_PARSE_CONFIG, the
only route for `sglang.Engine(...)`, which rejects unknown keywords) or from the
defaults, in that order of precedence.
"""

from __future__ import annotations

import dataclasses
import json
import os
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from sglang_parse.judge import CUT_MARK

CONFIG_ENV = "SGLANG_PARSE_CONFIG"
FLAG_PREFIX = "--speculative-parse-"
MODES = ("semantic", "exact", "off")
KEEP_RULES = ("first-failure", "longest")
COMPOSITIONS = ("none", "eagle3")
VERIFY_ROUTES = ("auto", "mask", "virtual")
SEGMENTERS = ("line", "paragraph", "sentence", "step", "code")
DEFAULT_JUDGE_SUFFIX = "Is everything so far correct? Answer Yes or No."
MAX_THRESHOLD = 2.0
RECOVER_ALL = "all"


_short = reprlib.Repr()
_short.maxstring = _short.maxother = _short.maxlong = 80


def shown(value: Any) -> str:
    """`value` as an error message shows it: one short line whatever a client sent."""
    return _short.repr(value)


def parse_fixed_segmenter(name: str) -> int | None:
    """Length N of a `fixed:N` segmenter, or None if `name` is not of that form."""
    head, _, tail = name.partition(":")
    is_count = tail.isascii() and tail.isdigit() and len(tail) <= 7
    return int(tail) if head == "fixed" and is_count and int(tail) >= 1 else None


def check_segmenter(name: Any, field: str) -> str:
    """Return `name` if it names a segmenter; ValueError names `field` otherwise."""
    if isinstance(name, str) and (
        name in SEGMENTERS or parse_fixed_segmenter(name) is not None
    ):
        return name
    raise ValueError(
        f"{field} is {shown(name)}; expected one of {', '.join(SEGMENTERS)} or fixed:N "
        "with N >= 1."
    )


def check_choice(value: Any, field: str, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of `choices`; ValueError names `field` otherwise."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(
            f"{field} is {shown(value)}; expected one of {', '.join(choices)}."
        )
    return value


def check_number(value: Any, field: str, low: float, high: float) -> float:
    """Return `value` as a finite float in [low, high]; ValueError names `field`."""
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    # NaN fails the comparison; integers too large for a float do not reach float().
    if not is_number or not low <= value <= high:
        raise ValueError(
            f"{field} is {shown(value)}; expected a number from {low:g} to {high:g}."
        )
    return float(value)


def check_count(value: Any, field: str, low: int, high: int) -> int:
    """Return `value` if it is an integer in [low, high]; ValueError names `field`."""
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not low <= value <= high:
        raise ValueError(
            f"{field} is {shown(value)}; expected a whole number from {low} to {high}."
        )
    return int(value)


def check_text(value: Any, field: str, max_chars: int = 2000) -> str:
    """Return `value` if it is non-blank text of at most `max_chars` characters.

    Lone surrogates, which JSON can carry and no tokenizer can encode, are no text.
    """
    is_text = isinstance(value, str) and value.strip() and len(value) <= max_chars
    if not is_text or any("\ud800" <= c <= "\udfff" for c in value):
        raise ValueError(
            f"{field} is {shown(value)}; expected non-empty text of at most "
            f"{max_chars} characters."
        )
    return value


def check_question(value: Any, field: str) -> str:
    """Return `value` if it can be asked behind a draft; ValueError names `field`."""
    question = check_text(value, field)
    if CUT_MARK in question:
        raise ValueError(
            f"{field} is {shown(value)}; expected text without {CUT_MARK!r}."
        )
    return question


def check_flag(value: Any, field: str) -> bool:
    """Return `value` if it is a bool; ValueError names `field` otherwise."""
    if not isinstance(value, bool):
        raise ValueError(f"{field} is {shown(value)}; expected true or false.")
    return value


def parse_verdict_tokens(text: Any, field: str) -> tuple[tuple[str, str], ...]:
    """Split "Yes/No,yes/no" into (("Yes", "No"), ("yes", "no")); spaces count."""
    pairs = []
    for pair in text.split(",") if isinstance(text, str) else [""]:
        yes, slash, no = pair.partition("/")
        if not slash or not yes or not no or yes == no:
            raise ValueError(
                f"{field} is {shown(text)}; expected pairs such as 'Yes/No' or "
                "'Yes/No,yes/no'."
            )
        pairs.append((yes, no))
    return tuple(pairs)


def check_recover(value: Any, field: str) -> int | str:
    """Return `value` if it counts segments or is "all"; ValueError names `field`."""
    if value == RECOVER_ALL:
        return RECOVER_ALL
    is_int = isinstance(value, int) and not isinstance(value, bool)
    if not is_int or not 0 <= value <= 1024:
        raise ValueError(
            f"{field} is {shown(value)}; expected a whole number from 0 to 1024 or "
            f"{RECOVER_ALL!r}."
        )
    return int(value)


@dataclass(frozen=True)
class ParseConfig:
    """Settings of one server. Every field has a flag `--speculative-parse-<field>`.

    Raises ValueError naming the flag, the value and what was expected.
    """

    # Draft tokens a round; 0 drafts the whole response, as in the paper.
    window: int = 256
    # Prefixes judged per request in one pass.
    max_segments: int = 16
    segmenter: str = "step"
    # Judge at every so-manieth boundary; 0: as it pays (spacing.py), at every one where
    # nothing is adaptive.
    judge_every: int = 0
    judge_suffix: str = DEFAULT_JUDGE_SUFFIX
    verdict_tokens: str = "Yes/No"
    # A prefix is valid when P(yes) / (P(yes) + P(no)) >= threshold.
    threshold: float = 0.5
    keep_rule: str = "first-failure"
    mode: str = "semantic"
    # After the cut, keep draft tokens that equal the target's own choice.
    exact_tail: bool = True
    # Segments the target writes itself after a rejection, before verdicts count again;
    # "all": the rest of the response, as in the paper.
    recover_segments: int | str = 1
    # Windows follow acceptance and measured cost; off: always the full window.
    adaptive: bool = True
    # Bound on a round's time where windows adapt, so on what a new request waits.
    max_round_ms: int = 500
    # How a verify pass is put to the attention backend (routes.py).
    verify_route: str = "auto"
    # What drafts where the target is followed token by token (eagle.py).
    compose: str = "none"
    eagle_model_path: str = ""
    # Tokens the EAGLE-3 head drafts at a time.
    eagle_steps: int = 4

    def __post_init__(self) -> None:
        flag = flag_name
        check_count(self.window, flag("window"), 0, 1 << 20)
        check_count(self.max_segments, flag("max_segments"), 1, 1024)
        check_segmenter(self.segmenter, flag("segmenter"))
        check_count(self.judge_every, flag("judge_every"), 0, 1024)
        check_question(self.judge_suffix, flag("judge_suffix"))
        parse_verdict_tokens(self.verdict_tokens, flag("verdict_tokens"))
        check_number(self.threshold, flag("threshold"), 0.0, MAX_THRESHOLD)
        check_choice(self.keep_rule, flag("keep_rule"), KEEP_RULES)
        check_choice(self.mode, flag("mode"), MODES)
        check_flag(self.exact_tail, flag("exact_tail"))
        check_recover(self.recover_segments, flag("recover_segments"))
        check_flag(self.adaptive, flag("adaptive"))
        check_count(self.max_round_ms, flag("max_round_ms"), 0, 1 << 20)
        check_choice(self.verify_route, flag("verify_route"), VERIFY_ROUTES)
        check_choice(self.compose, flag("compose"), COMPOSITIONS)
        check_count(self.eagle_steps, flag("eagle_steps"), 1, 64)
        if not isinstance(self.eagle_model_path, str):
            check_text(self.eagle_model_path, flag("eagle_model_path"))
        if self.composes != bool(self.eagle_model_path):
            raise ValueError(
                f"{flag('compose')} is {self.compose!r} and "
                f"{flag('eagle_model_path')} is {shown(self.eagle_model_path)}; "
                "expected 'eagle3' with the path of an EAGLE-3 head, or neither."
            )

    @property
    def composes(self) -> bool:
        """Whether an EAGLE-3 head drafts too."""
        return self.compose == "eagle3"

    @property
    def verdict_pairs(self) -> tuple[tuple[str, str], ...]:
        return parse_verdict_tokens(self.verdict_tokens, flag_name("verdict_tokens"))

    @classmethod
    def from_sources(
        cls, flags: Mapping[str, Any] | None = None, path: str | None = None
    ) -> ParseConfig:
        """Merge flags given on the command line over a JSON file over the defaults.

        flags: field name to value; None values mean "not given". path: JSON file;
        falls back to $SGLANG_PARSE_CONFIG. Raises ValueError on an unreadable file,
        an unknown key or a bad value.
        """
        values = {}
        if path:
            values = _read_config_file(path, flag_name("config"))
        elif path := os.environ.get(CONFIG_ENV):
            values = _read_config_file(path, f"${CONFIG_ENV}")
        given = {k: v for k, v in (flags or {}).items() if v is not None}
        return cls(**{**values, **given})


def flag_name(field: str) -> str:
    """`max_segments` -> `--speculative-parse-max-segments`."""
    return FLAG_PREFIX + field.replace("_", "-")


def _read_config_file(path: str, source: str) -> dict[str, Any]:
    """source: the flag or variable that names the file, for messages."""
    try:
        with open(path, encoding="utf-8") as f:
            values = json.load(f)
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"{source} {path!r} is not a readable JSON file: {e}.") from e
    known = [f.name for f in dataclasses.fields(ParseConfig)]
    unknown = sorted(set(values) - set(known)) if isinstance(values, dict) else [values]
    if not isinstance(values, dict) or unknown:
        raise ValueError(
            f"{source} {path!r} has unknown keys {unknown}; "
            f"expected a JSON object with keys among {', '.join(known)}."
        )
    return values
