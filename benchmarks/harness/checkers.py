"""Answer checkers: text of the last turn and the reference -> right or wrong.

Mathematics is compared by math-verify; code runs against the data set's own tests in
sandbox.py; open answers are rated by a model of the user's choice.
"""

from __future__ import annotations

import json
import re
import threading
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.harness.bfcl import check_calls
from benchmarks.harness.datasets import Item
from benchmarks.harness.sandbox import run_program
from sglang_parse.calibrate.answers import boxed, check_final, last_number
from sglang_parse.embedded import task

# Only the word in any case: "the answer is a bit subtle" names no option, nor does
# "the answer I choose".
_CHOICE = re.compile(
    r"(?i:answer)\s*(?:(?i:is)|:)?[\s*:]*(?:[$(\[]|\\[(\[])*\s*"
    r"(?:\\boxed\{|\\text\{|\\mathrm\{|\\textbf\{)*\(?([A-HJ]|I(?!\s+[a-z]))\b"
)
_LAST_LETTER = re.compile(r"(?:^|[\s(*])([A-J])[).*]*\s*$")
_FENCE = re.compile(r"^\s*(?:```|~~~)\s*([\w+-]*)\s*$")
# Of one parse or comparison: a tower of powers is evaluated for ever.
MATH_TIMEOUT_S = 5
_RATING = re.compile(r"\[\[(\d+(?:\.\d+)?)\]\]")


def check_math(text: str, gold: str) -> bool:
    """math-verify's comparison of the final answers."""
    from math_verify import parse, verify

    # Its time limits use signals, which only the main thread may set.
    is_main = threading.current_thread() is threading.main_thread()
    limit = MATH_TIMEOUT_S if is_main else None
    answer = parse(text, parsing_timeout=limit)
    expected = parse(f"${gold}$", parsing_timeout=limit)
    return bool(verify(expected, answer, timeout_seconds=limit))


def choice_letter(text: str) -> str | None:
    """The letter of the last "answer: X", a boxed one, or a letter at the very end."""
    found = _CHOICE.findall(text)
    if found:
        return str(found[-1]).upper()
    inner = re.sub(r"[^A-J]", "", boxed(text) or "")
    if len(inner) == 1:
        return inner
    match = _LAST_LETTER.search(text)
    return match.group(1) if match else None


def check_choice(text: str, gold: str) -> bool:
    return choice_letter(text) == gold


def code_of(text: str, entry_point: str = "") -> str:
    """The last fenced block that defines `entry_point`, else the last block of Python
    or of no language, or the whole text."""
    blocks: list[tuple[str, str]] = []
    language: str | None = None
    lines: list[str] = []
    for line in text.splitlines(keepends=True):
        fence = _FENCE.match(line)
        if fence is None:
            lines.append(line)
        elif language is None:
            language, lines = fence.group(1).lower(), []
        else:
            blocks.append((language, "".join(lines)))
            language = None
    if language is not None:
        blocks.append((language, "".join(lines)))
    defines = re.compile(rf"^\s*def {re.escape(entry_point)}\b", re.MULTILINE)
    if entry_point:
        for _, body in reversed(blocks):
            if defines.search(body):
                return body
    python = [b for name, b in blocks if name in ("", "py", "python", "python3")]
    return python[-1] if python else text


def check_code(text: str, reference: Mapping[str, str]) -> bool:
    """Whether the program passes the data set's tests.

    The head (the prompt's imports, helpers and signature, whose docstring makes it a
    program of its own) stands before a whole function as before a bare body.
    """
    body = code_of(text, reference.get("entry_point", ""))
    gap = "" if body[:1].isspace() else "\n"
    program = reference["head"] + gap + body + "\n" + reference["tests"]
    return run_program(program).passed


def check_own(text: str, gold: str | None) -> bool | None:
    """The final answer against a reference of the user's; None without one."""
    return None if gold is None else check_final(text, gold)


def check_embedded(text: str, problem: task.Problem) -> bool:
    return task.check_answer(problem, text)


def check_number(text: str, gold: str) -> bool:
    """Compare the last numbers of both texts (GSM8K's flexible match)."""
    number = last_number(text)
    return number is not None and number == last_number(gold)


CHECKERS: dict[str, Callable[[str, Any], bool | None]] = {
    "number": check_number,
    "math": check_math,
    "choice": check_choice,
    "code": check_code,
    "answer": check_own,
    "embedded": check_embedded,
    "calls": check_calls,
    "none": lambda text, reference: None,
    "rating": lambda text, reference: None,  # rate() is asked instead
}


def is_right(checker: str, item: Item, text: str) -> bool | None:
    """Whether the last turn's text is right; None where nothing can tell."""
    return CHECKERS[checker](text, item.reference)


# A rating from 1 to 10 of one answer, as MT-Bench asks for it; our own wording, so
# absolute ratings do not compare with published ones, differences between arms do.
RATE = """You are an impartial judge of an assistant's answers. Consider helpfulness, \
correctness, depth and clarity; length and style of greeting do not count. Give two \
sentences of reasons, then a rating from 1 to 10 in double brackets, such as [[5]].

{conversation}

Rate the assistant's last answer."""


def rate(item: Item, texts: Sequence[str], judge: Mapping[str, str]) -> float | None:
    """A judge model's rating of the last of `texts`, 1 to 10; None if it gives none.

    texts: the answers to the first turns, or to all of them.

    judge: {url, model} of an OpenAI-compatible endpoint, and perhaps its `api_key`.
    Raises OSError if it does not answer.
    """
    parts = []
    for number, (turn, text) in enumerate(zip(item.turns, texts, strict=False)):
        parts.append(f"[User]\n{turn}")
        if isinstance(item.reference, Sequence) and number < len(item.reference):
            parts.append(f"[Reference answer]\n{item.reference[number]}")
        parts.append(f"[Assistant]\n{text}")
    content = RATE.format(conversation="\n\n".join(parts))
    body = {
        "model": judge.get("model", "default"),
        "temperature": 0,
        "messages": [{"role": "user", "content": content}],
    }
    headers = {"Content-Type": "application/json"}
    if judge.get("api_key"):
        headers["Authorization"] = f"Bearer {judge['api_key']}"
    request = urllib.request.Request(
        judge["url"].rstrip("/") + "/chat/completions",
        data=json.dumps(body).encode(),
        headers=headers,
    )
    with urllib.request.urlopen(request, timeout=600) as response:
        reply = json.load(response)
    found = _RATING.findall(reply["choices"][0]["message"]["content"] or "")
    return float(found[-1]) if found else None
