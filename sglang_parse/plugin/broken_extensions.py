"""Segmenters and judges of installed packages, checked at the start.

One that a flag names has to work. The log names others that are broken.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_parse.judging.extension_rules import load_rule, make_rule
from sglang_parse.judging.judges import make_judge, open_judge
from sglang_parse.options.judge_names import JUDGE_EXTENSIONS, QUESTION_JUDGE
from sglang_parse.options.segmenters import SEGMENTER_EXTENSIONS
from sglang_parse.options.server import ParseConfig
from sglang_parse.options.table import flag_name

logger = logging.getLogger(__name__)


def check_asked(config: ParseConfig, tokenizer: Any) -> None:
    """The segmenter and the judge of the server can be used.

    tokenizer: of the target. Raises ValueError naming the flag, or the package and its
    flag, where they cannot.
    """
    if config.segmenter in SEGMENTER_EXTENSIONS.found:
        _check("segmenter", config.segmenter, lambda: load_rule(config.segmenter))

    def ask() -> object:
        judge = open_judge(config.judge, tokenizer, config.verdict_pairs)
        return judge.ask(config.judge_suffix)

    if config.judge == QUESTION_JUDGE:
        ask()
    else:
        _check("judge", config.judge, ask)


def warn_of_broken() -> None:
    """Log a warning for each segmenter and judge that cannot be loaded. A request that
    names such a segmenter is answered with HTTP 400."""
    faults = SEGMENTER_EXTENSIONS.faults(make_rule)
    for fault in (*faults, *JUDGE_EXTENSIONS.faults(make_judge)):
        logger.warning("PARSE starts without an extension: %s", fault)


def _check(field: str, name: str, load: Callable[[], object]) -> None:
    try:
        load()
    except ValueError as e:
        raise ValueError(f"{flag_name(field)} is {name!r}: {e}") from e
