"""Marks of thinking between a target and a draft."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from sglang_parse.drafting.text_bridge import DraftWriter, TextEncoder, TokenBytes
from sglang_parse.drafting.thinking import marks_of, thinking_state
from sglang_parse.drafting.transcript import Transcript
from sglang_parse.judging.special_tokens import THINKING_PAIRS
from tests.support import tokenizer_kinds as kinds

TAGS, WORDS = THINKING_PAIRS[0], THINKING_PAIRS[1]


def with_marks(tokenizer, pair, *, special=False, template=""):
    """A copy of a tokenizer with these two marks."""
    made, _ = kinds.permuted(tokenizer, seed=3)
    made.add_tokens([AddedToken(text, special=special) for text in pair])
    made.chat_template = template or None
    return made


@pytest.mark.parametrize("special", [False, True])
def test_marks_are_handed_over_as_text(special):
    """Red if a draft reads the target's mark as text of many tokens, or the target gets
    the draft's as letters, or not at all where they are special tokens."""
    target = with_marks(kinds.embedded(), TAGS, special=special)
    draft = with_marks(kinds.byte_level(), TAGS, special=special)
    ours, theirs = TextEncoder(target), TextEncoder(draft)
    text = b"<think>\nSo 3 + 4 = 7.\n</think>\n\n7"
    answer = target.encode(text.decode(), add_special_tokens=False)
    assert ours.pieces.join(answer) == text
    transcript = Transcript(theirs)
    transcript.follow(0, text)
    assert set(marks_of(draft).ids) <= set(transcript.ids)
    assert DraftWriter(ours).write(text, most=100, whole=True) == answer
    # What the draft writes itself goes the same way.
    own = Transcript(theirs)
    own.follow(0, b"\n")
    new = draft.encode("\n<think> well\n</think>", add_special_tokens=False)[1:]
    assert own.append(new) == len(new)
    ids = DraftWriter(ours).write(bytes(own.text[1:]), most=100, whole=True)
    assert marks_of(target).ids[1] in ids


@pytest.mark.parametrize(
    ("tail", "state"),
    [
        ("<think>\n", "open"),
        ("<think>\n\n</think>\n\n", "closed"),
        ("", ""),
        ("<think> so </think> and", ""),
    ],
)
@pytest.mark.parametrize("own", ["", "[THINK]\n", "[THINK]\n\n[/THINK]\n\n"])
def test_the_prompt_leaves_thinking_as_the_targets_does(tail, state, own):
    """Red if the draft thinks where the target answers, or answers where it thinks."""
    target = with_marks(kinds.embedded(), TAGS)
    draft = with_marks(kinds.byte_level(), WORDS, template="[THINK] {{ x }} [/THINK]")
    prompt = target.encode("go:" + tail, add_special_tokens=False)
    assert thinking_state(marks_of(target), TokenBytes(target), prompt) == state
    expected = {"open": "[THINK]\n", "closed": "[THINK]\n\n[/THINK]\n\n", "": ""}
    assert marks_of(draft).fit("go:" + own, state) == "go:" + expected[state]


def test_a_target_without_marks_has_the_draft_answer_at_once():
    """Red if a hybrid draft thinks first for a target that never does."""
    draft = with_marks(kinds.byte_level(), WORDS, template="[THINK] {{ x }} [/THINK]")
    assert marks_of(kinds.embedded()) is None
    state = thinking_state(None, TokenBytes(kinds.embedded()), [5, 6])
    assert marks_of(draft).fit("go:", state).endswith("[/THINK]\n\n")
    # A draft whose template knows no thinking is left alone.
    draft.chat_template = None
    assert marks_of(draft).fit("go:", state) == "go:"
