"""The final answer of a text, and whether it is right."""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation

# The lookbehind excludes exponents such as the 2 of `240 ft^2`.
_NUMBER = re.compile(r"(?<![\^\d])-?\$?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
_FRACTION = re.compile(r"(\d*)\s*\\[dt]?frac\s*\{(\d+)\}\s*\{(\d*[1-9]\d*)\}")
_BOXED = re.compile(r"\\boxed\s*\{")
_MARKED = re.compile(r"(?im)^[\s*_#>]*(?:final )?answer[\s*_]*:[\s*_]*(.*\S)\s*$")
# LaTeX's thin spaces and grouping braces inside numbers: 70{,}000 and 70,\!000.
_THIN = re.compile(r"\\[,;:! ]|[{}]|~")


def boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} with matched braces, or None."""
    starts = [m.end() for m in _BOXED.finditer(text)]
    if not starts:
        return None
    depth = 1
    for at in range(starts[-1], len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return text[starts[-1] : at]
    return None


def last_number(text: str) -> Decimal | None:
    """The last number of the boxed answer, else of the text; None without a number."""
    inner = _FRACTION.sub(_as_decimal, boxed(text) or "")
    for part in (_THIN.sub("", inner), text):
        found = _NUMBER.findall(part)
        if found:
            try:
                return Decimal(found[-1].replace(",", "").replace("$", ""))
            except InvalidOperation:
                return None
    return None


def _as_decimal(fraction: re.Match[str]) -> str:
    """7/2 as 3.5, and the mixed number 3 1/2 too."""
    whole, over, under = (Decimal(g or 0) for g in fraction.groups())
    return f"{whole + over / under:f}"


def final_answer(text: str) -> str:
    """The boxed answer, the one after "Answer:", the last number, or the last line."""
    inner = boxed(text)
    if inner is not None:
        return _normal(inner)
    marked = _MARKED.findall(text)
    if marked:
        return _normal(marked[-1])
    number = last_number(text)
    if number is not None:
        return format(number.normalize(), "f")
    lines = text.strip().splitlines()
    return _normal(lines[-1]) if lines else ""


def check_final(text: str, gold: str) -> bool:
    """Compare the final answer with a reference, which may be a whole text itself."""
    return final_answer(text) in (_normal(gold), final_answer(gold))


def _normal(text: str) -> str:
    """A lone number in one spelling; other text in lower case with single spaces,
    without surrounding quotes and full stops."""
    bare = _THIN.sub("", text).strip("*_`'\".$ \t\n")
    if _NUMBER.fullmatch(bare):
        return format(Decimal(re.sub("[,$]", "", bare)).normalize(), "f")
    return " ".join(text.split()).casefold().strip("*_`'\". ")
