"""Blocks of code between fences."""

import random

import pytest

from sglang_parse.judging.fences import FENCE, FenceReader, fenced, holds

LINES = ["```", "```python", "~~~", "~~~~", "text", "", "  ```", "x ```", "````"]


def slow_fenced(text):
    """For texts that begin outside a block: line by line."""
    spans, at, opened, start = [], 0, "", 0
    for line in text.split("\n"):
        fence = FENCE.fullmatch(line)
        if fence and not opened:
            opened, start = fence[1], at
        elif fence and fence[1].startswith(opened) and not fence[2].strip():
            spans.append((start, at + len(line)))
            opened = ""
        at += len(line) + 1
    return [*spans, (start, len(text))] if opened else spans


def random_text(rng):
    return "\n".join(["```x", *rng.choices(LINES, k=rng.randint(0, 12))])


@pytest.mark.parametrize("seed", range(5))
def test_blocks_equal_oracle(seed):
    """Red if a block ends at a shorter fence, at one with a language, or one late."""
    rng = random.Random(seed)
    for _ in range(200):
        text = random_text(rng)
        spans = fenced(text)
        assert spans == slow_fenced(text), text
        inside = [any(a <= at < b for a, b in spans) for at in range(len(text))]
        assert inside == [holds(spans, at) for at in range(len(text))]


@pytest.mark.parametrize("seed", range(5))
def test_reader_knows_what_is_open_before_each_token(seed):
    """Red if a fence is lost at a token's border, or counted from the wrong token."""
    rng = random.Random(seed)
    for _ in range(100):
        text = random_text(rng) + "\n"
        cuts = sorted(rng.sample(range(1, len(text)), rng.randint(1, len(text) - 1)))
        edges = [0, *cuts, len(text)]
        pieces = [text[a:b] for a, b in zip(edges, edges[1:], strict=False)]
        reader = FenceReader()
        half = rng.randint(0, len(pieces))
        reader.read(pieces[:half])
        reader.read(pieces[half:])
        for k, at in enumerate(edges):
            if text[:at].endswith("\n"):
                spans = slow_fenced(text[:at] + ".")
                is_open = bool(spans) and spans[-1][1] == at + 1
                assert bool(reader.open_before(k)) == is_open, (pieces, k)


def test_a_long_line_is_not_kept():
    reader = FenceReader()
    reader.read(["x" * 1000] * 1000)
    assert len(reader._line) < 1000
