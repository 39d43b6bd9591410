"""Tokens that stand for no text, and text in which none of them is read.

A tokenizer finds special tokens in any text. One that is cut inside, so that both parts
are encoded by themselves, is plain text. The option `split_special_tokens` of
Transformers is not used: it is state of a tokenizer that all threads share, does not
concern tokens that are added without being special, and some tokenizers ignore it.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Any

# As SGLang's reasoning parsers name them (sglang/srt/parser/reasoning_parser.py).
THINKING_PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)
#: All of them. In drafts they are text, also where a tokenizer calls them special.
THINKING_MARKS = frozenset(chain(*THINKING_PAIRS))
# An encoded part follows it, so that no tokenizer puts the space of a first word there.
FRONT = "\n"
TURNS = (("user", "a"), ("assistant", "b"), ("user", "c"))


def special_ids(tokenizer: Any) -> frozenset[int]:
    """Ids of special tokens, and of added ones that the chat template writes around
    turns: DeepSeek's tokenizers do not call these special."""
    added = getattr(tokenizer, "added_tokens_decoder", {})
    found = {i for i, token in added.items() if token.special}
    messages = [{"role": role, "content": content} for role, content in TURNS]
    try:
        chat = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
    except Exception:  # templates raise whatever they like
        chat = ""
    found |= {i for i, token in added.items() if _is_mark(token.content, chat)}
    return frozenset(found | set(tokenizer.all_special_ids))


def _is_mark(content: str, template: Any) -> bool:
    """Whether an added token that a template, or what it rendered, holds is neither a
    word nor one around thinking."""
    is_word = not content.strip() or content.isalnum()
    is_text = is_word or content in THINKING_MARKS
    return isinstance(template, str) and not is_text and content in template


class Cutter:
    """Puts a mark inside each special token of a text, and inside each added token that
    the chat template names, such as one around calls of tools. The text is encoded in
    the parts between marks."""

    def __init__(self, tokenizer: Any, mark: str) -> None:
        """mark: a text that no other text holds."""
        self.mark = mark
        self._pattern, self._beginnings = _tokens(tokenizer, named=True)

    def cut(self, text: str) -> str:
        """The text with a mark behind the first character of each such token."""
        return self.mark.join(cut_text(text, self._pattern))

    def cut_all(self, value: Any) -> Any:
        """A JSON value with all its texts cut."""
        if isinstance(value, str):
            return self.cut(value)
        if isinstance(value, dict):
            return {self.cut_all(k): self.cut_all(v) for k, v in value.items()}
        if isinstance(value, list):
            return [self.cut_all(v) for v in value]
        return value

    def may_go_on(self, text: str) -> bool:
        """Whether the text ends in the beginning of such a token."""
        longest = max(map(len, self._beginnings), default=0)
        ends = (text[-num:] for num in range(1, min(longest, len(text)) + 1))
        return any(end in self._beginnings for end in ends)


@functools.lru_cache(8)
def _tokens(
    tokenizer: Any, *, named: bool = False
) -> tuple[re.Pattern[str], frozenset[str]]:
    """Matches special tokens of more than one character; and their proper beginnings.

    named: whether added tokens that the chat template names count too.
    """
    added, special = tokenizer.added_tokens_decoder, special_ids(tokenizer)
    template = str(getattr(tokenizer, "chat_template", None) or "") if named else ""
    texts = set(tokenizer.all_special_tokens) | {
        token.content
        for i, token in added.items()
        if i in special or _is_mark(token.content, template)
    }
    longest_first = sorted((t for t in texts if len(t) > 1), key=len, reverse=True)
    pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
    return pattern, frozenset(t[:k] for t in longest_first for k in range(1, len(t)))


def cut_text(text: str, pattern: re.Pattern[str]) -> Iterator[str]:
    """Parts of a text that hold no match of `pattern`, also where matches overlap."""
    start = 0
    while found := pattern.search(text, start):
        yield text[start : found.start() + 1]
        start = found.start() + 1
    yield text[start:]


def encode_as_text(tokenizer: Any, text: str) -> list[int]:
    """Ids of `text`, none of which is a special token's."""
    parts = list(cut_text(text, _tokens(tokenizer)[0]))
    return encode_parts(tokenizer, parts, add_special_tokens=False)


def encode_parts(tokenizer: Any, parts: Sequence[str], **of_first: bool) -> list[int]:
    """Ids of parts that follow each other. of_first: how the tokenizer is to encode the
    first; the others are in the middle of a text."""
    first, *others = [part for part in parts if part] or [""]
    return [
        *tokenizer.encode(first, **of_first),
        *chain(*_encode_middles(tokenizer, others)),
    ]


def _encode_middles(tokenizer: Any, parts: Sequence[str]) -> Iterable[list[int]]:
    if not parts:
        return
    texts = [FRONT, *(FRONT + part for part in parts)]
    if getattr(tokenizer, "is_fast", False):
        encoded = tokenizer(texts, add_special_tokens=False, verbose=False)
        front, *found = encoded["input_ids"]
    else:
        front, *found = (tokenizer.encode(t, add_special_tokens=False) for t in texts)
    for part, ids in zip(parts, found, strict=True):
        if ids[: len(front)] == front:
            yield ids[len(front) :]
        else:  # the part begins with what joins the front in one token
            yield tokenizer.encode(part, add_special_tokens=False)
