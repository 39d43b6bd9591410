"""Names of judges: the built-in one and those of installed packages."""

from __future__ import annotations

from typing import Any

from sglang_parse.options.extensions import Extensions
from sglang_parse.options.validation import refused

#: Asks a question and compares the answers yes and no.
QUESTION_JUDGE = "question"
JUDGE_EXTENSIONS = Extensions(
    "judge",
    built_in=(QUESTION_JUDGE,),
    expected="an object, or a class that is called without arguments, with that `name` "
    "and the methods suffix(tokenizer) and scores(logits)",
    functions=False,
)


def check_judge(name: Any, field: str) -> str:
    """Return `name` if it names a judge; ValueError names `field` otherwise."""
    if name == QUESTION_JUDGE:
        return QUESTION_JUDGE
    if isinstance(name, str) and JUDGE_EXTENSIONS.check(name, field):
        return name
    names = ", ".join((QUESTION_JUDGE, *JUDGE_EXTENSIONS.names()))
    raise refused(name, field, f"one of {names}")
