"""Client text as a drafter: where the output is in it, and what comes next."""

import random

import pytest

from sglang_parse.requests.client_text import MIN_RUN, ClientText

TEXT = list(range(100, 140))


def test_the_text_is_proposed_from_its_start():
    """Red if a prediction waits for a match before it is used."""
    assert ClientText(TEXT).propose([]) == tuple(TEXT)


def test_the_rest_follows_the_output():
    """Red if followed tokens are proposed again."""
    client = ClientText(TEXT)
    assert client.propose(TEXT[:3]) == tuple(TEXT[3:])
    assert client.propose(TEXT[:10]) == tuple(TEXT[10:])
    assert client.propose(TEXT) == ()
    assert client.num_accepted(TEXT) == len(TEXT)


@pytest.mark.parametrize(
    ("edited", "rest"),
    [
        ([*TEXT[:5], 7, *TEXT[6:9]], TEXT[9:]),  # replaced
        ([*TEXT[:5], 7, 8, 9, *TEXT[5:8]], TEXT[8:]),  # inserted
        ([*TEXT[:5], *TEXT[12:15]], TEXT[15:]),  # deleted
        ([*TEXT[:5], 7], ()),  # not back yet
        ([1, 2, 3, 4], ()),  # nothing to do with it
    ],
)
def test_the_text_is_found_again_after_an_edit(edited, rest):
    """Red if one changed line gives up the rest of the file."""
    client = ClientText(TEXT)
    client.propose(TEXT[:3])
    assert client.found_at is None
    assert client.propose(edited) == tuple(rest)
    assert client.found_at == (len(edited) if rest else None)


def test_one_token_is_not_a_place():
    """Red if every common word is taken for the place that the output has reached."""
    assert MIN_RUN == 2
    client = ClientText(TEXT)
    assert client.propose([1, 2, TEXT[20]]) == ()
    assert client.propose([1, 2, TEXT[20], TEXT[21]]) == tuple(TEXT[22:])


def test_the_longest_run_wins_then_the_next_place():
    """Red if a repeated phrase sends the draft back to its first occurrence."""
    phrase = [5, 6]
    text = [1, *phrase, 2, *phrase, 3, 9, *phrase, 4]
    client = ClientText(text)
    client.propose([1, 5, 6, 2])
    assert client.propose([1, 5, 6, 2, 77, 5, 6]) == (3, 9, 5, 6, 4)
    client = ClientText(text)
    assert client.propose([0, 9, 5, 6]) == (4,)


def test_accepted_tokens_are_those_of_the_output():
    """Red if skipped or replaced tokens count as accepted predictions."""
    client = ClientText(TEXT)
    output = [*TEXT[:5], 7, *TEXT[6:]]
    client.propose(output[:4])
    client.propose(output[:8])
    assert client.num_accepted(output) == len(TEXT) - 1


@pytest.mark.parametrize("num_left", [0, 3, 5, 6, 8, 30, 38])
def test_accepted_tokens_end_where_a_stop_cut(num_left):
    """Red if text that was followed ahead of the output counts behind a stop."""
    client = ClientText(TEXT)
    ahead = [*TEXT[:5], 7, *TEXT[6:39]]
    client.propose(ahead[:3])
    client.propose(ahead[:20])
    client.propose(ahead)
    assert client.num_accepted(ahead[:num_left]) == num_left - (num_left > 5)
    assert client.num_accepted(ahead) == len(ahead) - 1


def test_against_a_plain_search():
    """Red if the index misses an occurrence: compared with a scan of all places."""
    rng = random.Random(0)
    for _ in range(300):
        text = [rng.randrange(4) for _ in range(30)]
        output = [rng.randrange(4) for _ in range(12)]
        client = ClientText(text)
        rest = client.propose(output)
        if text[: len(output)] == output:
            assert rest == tuple(text[len(output) :])
            continue
        runs = {
            end: next(
                n
                for n in range(min(end, 12), -1, -1)
                if text[end - n : end] == output[12 - n :]
            )
            for end in range(len(text) + 1)
        }
        longest = max(runs.values())
        if longest < MIN_RUN:
            assert rest == ()
        else:
            ends = {end for end, run in runs.items() if run == longest}
            assert len(text) - len(rest) in ends


class Words:
    """A tokenizer of words, in the few ways ClientText uses one."""

    def encode(self, text: str, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return [len(word) for word in text.split()]


def test_segments_keep_their_ends():
    """Red if a list of segments is cut anywhere but between them."""
    client = ClientText.of(("a bb", "ccc", "d ee f"), Words())
    assert client.tokens == (1, 2, 3, 1, 2, 1)
    assert client.cuts == (2, 3, 6)
    assert ClientText.of("a bb", Words()).cuts is None


class Letters:
    """A tokenizer of one token a letter."""

    def encode(self, text, add_special_tokens):
        return [ord(letter) for letter in text]


def test_a_text_ends_before_its_first_stop_token():
    """Red if a session goes on from what a client wrote behind an end of text."""
    assert ClientText.of("ab.cd.", Letters(), {ord(".")}).tokens == (97, 98)
    assert ClientText.of("ab.", Letters()).tokens == (97, 98, 46)
    segments = ClientText.of(["a.", "b"], Letters(), {ord(".")})
    assert segments.tokens == (97, 46, 98) and segments.cuts == (2, 3)
