"""ParseConfig: the frozen settings of a server, checked once.

Settings come from the `--speculative-parse-*` flags, from a JSON file
(`--speculative-parse-config` or the environment variable SGLANG_PARSE_CONFIG, the
only route for `sglang.Engine(...)`, which rejects unknown keywords) or from the
defaults, in that order of precedence. The options themselves are in table.py.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_parse.options.judge_names import QUESTION_JUDGE
from sglang_parse.options.table import (
    DRAFT_HEADS,
    EAGLE3,
    HEADS,
    HEADS_OF_PATH,
    Option,
    ServerOptions,
    flag_name,
    options_of,
)
from sglang_parse.options.validation import (
    AUTO,
    did_you_mean,
    parse_verdict_tokens,
    shown,
)

CONFIG_ENV = "SGLANG_PARSE_CONFIG"
CONFIG_FLAG = flag_name("config")


@dataclass(frozen=True)
class ParseConfig(ServerOptions):
    """Settings of one server. Every field has a flag `--speculative-parse-<field>`.

    Raises ValueError naming the flag, the value and what was expected.
    """

    def __post_init__(self) -> None:
        for row in options_of(type(self)):
            row.kind.check(getattr(self, row.name), row.flag)
        if (self.compose in HEADS_OF_PATH) != bool(self.eagle_model_path):
            raise ValueError(
                f"{flag_name('compose')} is {self.compose!r} and "
                f"{flag_name('eagle_model_path')} is {shown(self.eagle_model_path)}; "
                "expected a head's path with 'eagle3', 'dflash' or 'dspark', and none "
                "elsewhere."
            )
        if (self.draft_guesser == EAGLE3) != bool(self.draft_eagle_model_path):
            raise ValueError(
                f"{flag_name('draft_compose')} is {self.draft_compose!r} and "
                f"{flag_name('draft_eagle_model_path')} is "
                f"{shown(self.draft_eagle_model_path)}; expected the path of a head of "
                "the draft model with 'eagle3', and one or none with 'auto'."
            )
        for head in HEADS:
            given = f"{flag_name('compose')} is {self.compose!r}"
            self._check_drafter(head, self.compose == head, given)
        state = "is set" if self.draft_url else "is not set"
        given = f"{flag_name('draft_url')} {state}"
        self._check_drafter("remote", bool(self.draft_url), given)
        self._check_question()

    def check_draft_model(self, path: str | None) -> None:
        """Raises ValueError where the draft model, of SGLang's flag, is named by one
        flag alone. path: None without one."""
        state = f"is {path!r}" if path else "is not set"
        given = f"--speculative-draft-model-path {state}"
        self._check_drafter("model", bool(path), given)
        if self.draft_guesser in DRAFT_HEADS and not path:
            head = "draft_eagle_model_path" if self.draft_guesser == EAGLE3 else ""
            option = head or "draft_compose"
            raise ValueError(
                f"{flag_name(option)} is {getattr(self, option)!r} and {given}; "
                "expected the draft model of that head."
            )

    def _check_drafter(self, name: str, is_named: bool, given: str) -> None:
        """Raises ValueError where `drafters` lists a drafter that another flag does not
        name, or the reverse. given: that flag and its value."""
        if self.drafters != AUTO and is_named != (name in self.drafter_names):
            raise ValueError(
                f"{flag_name('drafters')} is {self.drafters!r} and {given}; expected "
                f"both to name {name!r}, or neither."
            )

    def _check_question(self) -> None:
        """Only the built-in judge asks what can be set."""
        if self.judge == QUESTION_JUDGE:
            return
        for name in ("judge_suffix", "verdict_tokens"):
            value = getattr(self, name)
            if value != getattr(type(self), name):
                raise ValueError(
                    f"{flag_name(name)} is {shown(value)} and {flag_name('judge')} is "
                    f"{self.judge!r}, which has no use for it; expected only one of "
                    "the two."
                )

    @property
    def changes(self) -> str:
        """The options that differ from the defaults, as flags; "" if none does."""
        return ", ".join(
            f"{row.flag} {value if isinstance(value, (int, float)) else shown(value)}"
            for row in options_of(type(self))
            if (value := getattr(self, row.name)) != row.default
        )

    @property
    def draft_guesser(self) -> str:
        """What `draft_compose` stands for: "auto" is decided."""
        if self.draft_compose != AUTO:
            return self.draft_compose
        return EAGLE3 if self.draft_eagle_model_path else "ngram"

    @property
    def composes(self) -> bool:
        """Whether a head of the target drafts too."""
        return self.compose in HEADS

    @property
    def drafter_names(self) -> tuple[str, ...]:
        """The drafters that `drafters` lists, none with "auto"."""
        return () if self.drafters == AUTO else tuple(self.drafters.split(","))

    @property
    def verdict_pairs(self) -> tuple[tuple[str, str], ...]:
        """`verdict_tokens` as (yes, no) pairs."""
        return parse_verdict_tokens(self.verdict_tokens, flag_name("verdict_tokens"))

    @classmethod
    def from_sources(
        cls, flags: Mapping[str, Any] | None = None, path: str | None = None
    ) -> ParseConfig:
        """Merge flags given on the command line over a JSON file over the defaults.

        flags: field name to value; None values mean "not given". path: JSON file;
        falls back to $SGLANG_PARSE_CONFIG. Raises ValueError on an unreadable file,
        an unknown key or a bad value, and on a path that is given and empty.
        """
        values: dict[str, Any] = {}
        if path is not None:
            values = _read_config_file(path, CONFIG_FLAG, options_of(cls))
        elif path := os.environ.get(CONFIG_ENV):
            values = _read_config_file(path, f"${CONFIG_ENV}", options_of(cls))
        given = {k: v for k, v in (flags or {}).items() if v is not None}
        return cls(**{**values, **given})


def _read_config_file(
    path: str, source: str, table: Sequence[Option]
) -> dict[str, Any]:
    """source: the flag or variable that names the file, for messages."""
    if not path.strip():
        raise ValueError(f"{source} is {path!r}; expected the path of a JSON file.")
    try:
        if os.path.exists(path) and not os.path.isfile(path):
            raise OSError("it is no file")
        with open(path, encoding="utf-8") as f:
            values = json.load(f)
    except (OSError, ValueError, RecursionError) as e:
        raise ValueError(f"{source} {path!r} is not a readable JSON file: {e}.") from e
    known = [row.name for row in table]
    expected = f"expected a JSON object with keys among {', '.join(known)}."
    if not isinstance(values, dict):
        raise ValueError(f"{source} {path!r} holds no JSON object; {expected}")
    if unknown := sorted(set(values) - set(known)):
        raise ValueError(
            f"{source} {path!r} has unknown keys {unknown}"
            f"{did_you_mean(unknown[0], known)}; {expected}"
        )
    return values
