"""What rules read of a draft equals slow oracles over its texts."""

import random

import pytest

from sglang_parse.judging.draft_text import (
    BLANK,
    MARK,
    NEWLINE,
    DraftText,
    token_flags,
)
from sglang_parse.judging.segmenter import _join_blank
from tests.support import reference

PIECES = [
    "",
    " ",
    "\n",
    "a\n",
    "\nb",
    " \n ",
    "\n\n",
    "a\n\nb",
    "one",
    " two",
    ". ",
    "?",
]


def drafts(seed: int) -> list[DraftText]:
    rng = random.Random(seed)
    found = []
    for _ in range(200):
        pool = rng.sample(PIECES, rng.randint(1, 6))
        pieces = rng.choices(pool, k=rng.randint(1, 30))
        before = rng.choice(["", "x", "x\n", "\n \n"])
        found.append(DraftText(pieces, token_flags(pieces), before, ended=False))
    return found


@pytest.mark.parametrize("seed", range(5))
def test_line_breaks_equal_oracle(seed):
    """Red if a leading break counts, a token's first break is taken for its last, or
    offsets are counted from the draft's start."""
    for draft in drafts(seed):
        expected = reference.newline_tokens(draft.pieces)
        assert draft.newline_tokens == expected, draft
        breaks = reference.last_line_breaks(draft.pieces, draft.previous_text)
        assert draft.line_breaks() == breaks, draft


@pytest.mark.parametrize("seed", range(5))
def test_places_in_the_text_equal_oracle(seed):
    """Red if a token's end, or the token that holds a character, is one off."""
    for draft in drafts(seed):
        size = len(draft.previous_text)
        holders = []
        for i, piece in enumerate(draft.pieces):
            size += len(piece)
            assert draft.ends[i] == size
            holders += [i + 1] * len(piece)
        assert len(draft.text) == size
        start = len(draft.previous_text) + 1
        assert holders == [draft.boundary_at(at) for at in range(start, size + 1)]


def test_tokens_with_a_flag_are_those_whose_text_has_it():
    """Red if a flag is looked up in another's table, or hidden by a second one."""
    draft = DraftText(PIECES, token_flags(PIECES), "", ended=False)
    tokens = {f: [PIECES[i] for i in draft.tokens_with(f)] for f in (NEWLINE, BLANK)}
    assert tokens[NEWLINE] == [piece for piece in PIECES if "\n" in piece]
    assert tokens[BLANK] == [piece for piece in PIECES if not piece.strip()]
    assert [PIECES[i] for i in draft.tokens_with(MARK)] == [". ", "?"]


@pytest.mark.parametrize("seed", range(5))
def test_blank_segments_join_as_the_oracle_joins_them(seed):
    """Red if a blank segment stays alone, or at the start swallows a boundary."""
    rng = random.Random(seed)
    for draft in drafts(seed):
        num = len(draft.pieces)
        found = rng.choices(range(1, num + 1), k=rng.randint(0, num))
        expected = reference.merge_blank(found, draft.pieces)
        assert _join_blank(found, draft.flags) == expected, (draft, found)
