"""Tokens that stand for no text, and text in which none of them is read."""

from __future__ import annotations

import re

import pytest
from tokenizers import AddedToken

from sglang_parse.judging.segmenter import build_token_texts
from sglang_parse.judging.special_tokens import (
    Cutter,
    cut_text,
    encode_as_text,
    special_ids,
)
from tests.support import tokenizer_kinds

END = tokenizer_kinds.END
USER, THINK, CALL = "<｜User｜>", "<think>", "<tool_call>"
CHAT = (
    "{% for m in messages %}{{ '<｜User｜>' + m['content'] }}{% endfor %}"
    "{{ '<think>' }}{% if tools %}{{ '<tool_call>' }}{% endif %}"
)


def deepseek_like():
    """Its marks of turns, of thinking and of calls are added, and not special."""
    tokenizer = tokenizer_kinds.byte_level(421)
    marks = [AddedToken(t, normalized=False) for t in (USER, THINK, CALL, "word")]
    tokenizer.add_tokens(marks)
    tokenizer.chat_template = CHAT
    return tokenizer


class InPython:
    """As the tokenizers of Kimi: special tokens are found whatever the options say."""

    def __init__(self, fast):
        self._fast, self.is_fast, self.chat_template = fast, False, None
        self.added_tokens_decoder = fast.added_tokens_decoder
        self.all_special_tokens = fast.all_special_tokens
        self.all_special_ids = fast.all_special_ids

    def encode(self, text, **_):
        return self._fast.encode(text, add_special_tokens=False)


def test_marks_of_turns_are_special():
    """Red if a draft may write a mark of a turn that its tokenizer does not call
    special, or may not write a word, a call or thinking."""
    tokenizer = deepseek_like()
    user, think, call, word = tokenizer.convert_tokens_to_ids(
        [USER, THINK, CALL, "word"]
    )
    found = special_ids(tokenizer)
    assert user in found and found >= set(tokenizer.all_special_ids)
    assert not found & {think, call, word}
    texts = build_token_texts(tokenizer)
    assert (texts[user], texts[call]) == ("", CALL)


@pytest.mark.parametrize(
    "kind",
    [
        *(tokenizer_kinds.embedded, tokenizer_kinds.sentencepiece, deepseek_like),
        lambda: InPython(tokenizer_kinds.byte_level()),
    ],
)
def test_a_text_holds_no_special_token(kind):
    """Red if a special token, or a mark that the template writes, is one of a text, or
    a character is lost."""
    tokenizer = kind()
    special = {i for i, t in tokenizer.added_tokens_decoder.items() if t.special}
    text = f"a {END}{END}b {USER}c{THINK}"
    ids = encode_as_text(tokenizer, text)
    assert not special & set(ids)
    plain = getattr(tokenizer, "_fast", tokenizer)
    if kind is deepseek_like:
        assert plain.convert_tokens_to_ids(USER) not in ids
        assert plain.convert_tokens_to_ids(THINK) in ids
    if kind is not tokenizer_kinds.sentencepiece:  # it has no "｜"
        assert plain.decode(ids) == text


def test_messages_name_no_call():
    """Red if a message of a user may hold a token around calls of tools, which the
    template writes, or if a word is cut that a tokenizer has as a token."""
    cutter = Cutter(deepseek_like(), "0")
    assert cutter.cut(f"{CALL} word {THINK}") == f"<0tool_call> word {THINK}"
    assert cutter.cut_all({END: [END, 5, None]}) == {
        cutter.cut(END): ["<0|im_end|>", 5, None]
    }


def test_overlapping_tokens_are_all_cut():
    """Red if cutting one token leaves another whole."""
    pattern = re.compile("<s>|s>x|>xy")
    parts = list(cut_text("a<s>xyz<s>", pattern))
    assert "".join(parts) == "a<s>xyz<s>"
    assert not any(pattern.search(part) for part in parts)
    assert list(cut_text("", pattern)) == [""]


def test_a_text_that_may_become_a_token():
    """Red if the beginning of a token is overlooked, or every text is taken for one."""
    cutter = Cutter(tokenizer_kinds.embedded(), "0")
    assert all(cutter.may_go_on("a" + END[:k]) for k in range(1, len(END)))
    assert not any(map(cutter.may_go_on, ("", "a", END, END + "a")))
