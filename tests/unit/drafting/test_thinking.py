"""Marks of thinking between two models that write them otherwise."""

from __future__ import annotations

import pytest
from tokenizers import AddedToken

from sglang_parse.drafting.text_bridge import DraftWriter
from sglang_parse.drafting.thinking import PAIRS, Thinking, encoders_of, marks_of
from sglang_parse.drafting.transcript import Transcript
from tests.support import tokenizer_kinds as kinds

TAGS, WORDS = PAIRS[0], PAIRS[1]


def with_marks(tokenizer, pair, *, special=False, template=""):
    """A copy of a tokenizer with these two marks."""
    made, _ = kinds.permuted(tokenizer, seed=3)
    made.add_tokens([AddedToken(text, special=special) for text in pair])
    made.chat_template = template or None
    return made


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "special"])
def pair(request):
    """A target and a draft that write thinking otherwise."""
    special = request.param
    target = with_marks(kinds.embedded(), TAGS, special=special)
    draft = with_marks(kinds.byte_level(), WORDS, special=special)
    return target, draft


def test_each_side_reads_its_own_marks(pair):
    """Red if a draft reads the target's mark as text of many tokens, or the target gets
    the draft's as letters."""
    target, draft = pair
    ours, theirs = encoders_of(target, draft)
    answer = target.encode(
        "<think>\nSo 3 + 4 = 7.\n</think>\n\n7", add_special_tokens=False
    )
    text = ours.pieces.join(answer)
    assert text == b"[THINK]\nSo 3 + 4 = 7.\n[/THINK]\n\n7"
    transcript = Transcript(theirs)
    transcript.follow(0, text)
    assert set(marks_of(draft).ids) <= set(transcript.ids)
    writer = DraftWriter(ours)
    assert writer.write(text, most=100, whole=True) == answer
    # What the draft writes itself goes the same way.
    own = Transcript(theirs)
    own.follow(0, b"\n")
    new = draft.encode("\n[THINK] well\n[/THINK]", add_special_tokens=False)[1:]
    assert own.append(new) == len(new)
    assert marks_of(target).ids[1] in writer.write(
        bytes(own.text[1:]), most=100, whole=True
    )


def test_a_mark_that_the_target_lacks_ends_the_draft():
    """Red if thinking of the draft's is handed to a target that does not think."""
    draft = with_marks(kinds.byte_level(), TAGS)
    _, theirs = encoders_of(kinds.embedded(), draft)
    transcript = Transcript(theirs)
    transcript.follow(0, b"\n")
    words = draft.encode("so", add_special_tokens=False)
    assert transcript.append([*words, marks_of(draft).ids[0], *words]) == len(words)


def test_a_target_that_thinks_alone_keeps_its_marks():
    """Red if the target's marks are lost where the draft has none."""
    target = with_marks(kinds.embedded(), TAGS, special=True)
    ours, _ = encoders_of(target, kinds.byte_level())
    text = b"<think>\nso\n</think>\n"
    ids = DraftWriter(ours).write(text, most=50, whole=True)
    assert ours.pieces.join(ids) == text
    assert ids[0] == marks_of(target).ids[0]


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
def test_the_prompt_leaves_thinking_as_the_targets_does(pair, tail, state, own):
    """Red if the draft thinks where the target answers, or answers where it thinks."""
    target, draft = pair
    draft.chat_template = "[THINK] {{ x }} [/THINK]"
    thinking = Thinking(marks_of(target), marks_of(draft))
    ours, _ = encoders_of(target, draft)
    prompt = target.encode("go:" + tail, add_special_tokens=False)
    assert thinking.state(ours.pieces, prompt) == state
    expected = {"open": "[THINK]\n", "closed": "[THINK]\n\n[/THINK]\n\n", "": ""}
    fitted = thinking.fit("go:" + own, state)
    assert fitted == "go:" + expected[state]


def test_a_target_without_marks_has_the_draft_answer_at_once(pair):
    """Red if a hybrid draft thinks first for a target that never does."""
    _, draft = pair
    draft.chat_template = "[THINK] {{ x }} [/THINK]"
    thinking = Thinking(None, marks_of(draft))
    ours, _ = encoders_of(kinds.embedded(), draft)
    state = thinking.state(ours.pieces, [5, 6])
    assert thinking.fit("go:", state).endswith("[/THINK]\n\n")
    # A draft whose template knows no thinking is left alone.
    draft.chat_template = None
    assert Thinking(None, marks_of(draft)).fit("go:", state) == "go:"
    assert Thinking(None, None).fit("go:", state) == "go:"
