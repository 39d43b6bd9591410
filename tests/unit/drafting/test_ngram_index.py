"""The index of earlier text, held to a search through the whole of it."""

import random

import pytest

from sglang_parse.drafting.ngram_index import GRAMS, MAX_MATCH, MAX_PLACES, NgramIndex

LEAST = min(GRAMS)


def longest(tokens: list[int]) -> int:
    """The longest match of the text's end anywhere before, 0 below LEAST tokens."""
    n, best = len(tokens), 0
    for end in range(LEAST, n):
        num = 0
        while (
            num < min(MAX_MATCH, end) and tokens[end - 1 - num] == tokens[n - 1 - num]
        ):
            num += 1
        best = max(best, num)
    return best if best >= LEAST else 0


@pytest.mark.parametrize("seed", range(40))
def test_finds_the_longest_match(seed):
    """Red if a run is lost between prompt and answer, or another text is taken for it.

    Texts are so short that every place is compared.
    """
    rng = random.Random(seed)
    text = [rng.randrange(rng.choice((4, 9))) for _ in range(rng.randrange(MAX_PLACES))]
    start = rng.randrange(len(text) + 1)
    index = NgramIndex(text[:start])
    for at in range(start, len(text) + 1):
        found = index.find(near=0)
        assert (found.length if found else 0) == longest(text[:at])
        if found:
            n, end, length = at, found.cursor, found.length
            assert end < n and text[end - length : end] == text[n - length : n]
        index.extend(text[at : at + 1])
    assert index.tokens == text and len(index) == len(text)


def test_of_many_places_those_near_the_last_copy_are_compared():
    """Red if, in a file with one line a hundred times, a copy that an edit ended does
    not go on behind the edit."""
    lines = [[7, 8, 9, 100 + k] for k in range(100)]
    index = NgramIndex([t for line in lines for t in line])
    index.extend([7, 8, 9])
    for k in (0, 40, 99):
        at = 4 * k
        assert index.find(near=at).cursor == at + 3
    assert index.copy(4 * 40 + 3, 5) == [140, 7, 8, 9, 141]


def test_two_tokens_are_enough_where_three_are_not():
    """Red if an edited text costs a plain step for each token of a longer match, or if
    a place of two tokens is taken where another agrees in three."""
    index = NgramIndex([1, 5, 6, 7, 8, 9, 5, 6, 30, 5, 6])
    assert index.find(near=0) == (3, 2)
    index.extend([7])
    assert index.find(near=0) == (4, 3)
    many = NgramIndex([1, 2, 3, 50] + [9, 2, 3, 60] * 40 + [1, 2, 3])
    assert many.find(near=80) == (3, 3)


def test_a_copy_that_reaches_the_end_repeats():
    """Red if a loop is drafted once only, or tokens are made up."""
    index = NgramIndex([1, 2, 3, 1, 2, 3, 1, 2, 3])
    found = index.find(near=0)
    assert found.length >= max(GRAMS)
    assert index.copy(6, 8) == [1, 2, 3, 1, 2, 3, 1, 2]


def test_ids_beyond_the_key_are_told_apart():
    """Red if ids that share their low bits are taken for the same tokens."""
    big = 1 << 30
    index = NgramIndex([5, 6, 7, 8, big + 5, big + 6, big + 7])
    assert index.find(near=0) is None
