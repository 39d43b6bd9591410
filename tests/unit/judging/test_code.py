"""The reading of code that finds statements."""

import random
import re

import pytest

from sglang_parse.judging import code

PARTS = [
    *["x", "word", "=", ":", ",", "@", "+", ";", " ", "  ", "\t", "\n", "\r", "\xa0"],
    *["(", ")", "{", "}", "'", '"', '"""', "`", "```", "#", "//", "/*", "*/", "\\"],
]


@pytest.mark.parametrize("seed", range(5))
def test_a_run_of_words_reads_as_its_words_do(seed, monkeypatch):
    """Red if a run swallows a comment or a bracket, or hides what a line starts or ends
    with."""
    runs = rf"{code.WORD}(?:[ \t]+{code.WORD})*+"
    assert runs in code.ITEM.pattern
    single = re.compile(code.ITEM.pattern.replace(runs, code.WORD), code.ITEM.flags)
    rng = random.Random(seed)
    texts = ["".join(rng.choices(PARTS, k=rng.randint(0, 60))) for _ in range(300)]
    found = [code.statement_ends(text) for text in texts]
    monkeypatch.setattr(code, "ITEM", single)
    assert found == [code.statement_ends(text) for text in texts]
    assert any(found)
