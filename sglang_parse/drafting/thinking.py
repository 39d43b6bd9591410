"""Marks of thinking: what target and draft write around it, each in its own words.

A mark is one token. Where both models have marks, each reads its own in place of the
other's, and the draft's prompt begins or leaves out thinking as the target's does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sglang_parse.drafting.text_bridge import TextEncoder, TokenBytes

# As SGLang's reasoning parsers name them (sglang/srt/parser/reasoning_parser.py).
PAIRS = (
    ("<think>", "</think>"),
    ("[THINK]", "[/THINK]"),
    ("◁think▷", "◁/think▷"),
    ("<mm:think>", "</mm:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
)


@dataclass(frozen=True)
class Marks:
    """What one tokenizer writes around thinking."""

    opening: str
    closing: str
    #: Their token ids.
    ids: tuple[int, int]
    #: Whether the tokenizer's chat template knows them.
    in_template: bool = False


def marks_of(tokenizer: Any) -> Marks | None:
    """A tokenizer's marks; None where it has none that are a token each."""
    vocab = tokenizer.get_added_vocab()
    for opening, closing in PAIRS:
        if opening in vocab and closing in vocab:
            template = str(getattr(tokenizer, "chat_template", None) or "")
            ids = vocab[opening], vocab[closing]
            return Marks(opening, closing, ids, closing in template)
    return None


def encoders_of(target: Any, draft: Any) -> tuple[TextEncoder, TextEncoder]:
    """Encoders of two tokenizers, which hand marks of thinking over.

    The target's reads its marks as the draft's. Marks that the target lacks end a
    draft, as other special tokens do.
    """
    ours, theirs = marks_of(target), marks_of(draft)
    pieces, own = TokenBytes(target), TokenBytes(draft)
    found: dict[str, int] = {}
    if ours is not None:
        named = theirs or ours
        texts = (named.opening, named.closing)
        found = dict(zip(texts, ours.ids, strict=True))
        names = {i: text.encode() for text, i in found.items()}
        pieces = pieces.renamed(names)
    if theirs is not None:
        own = own.renamed({i: own[i] for i in theirs.ids}, special=ours is None)
    return TextEncoder(target, pieces, found), TextEncoder(draft, own)


@dataclass(frozen=True)
class Thinking:
    """How a prompt leaves thinking: "open", "closed", or "" where it says nothing.

    ours, theirs: marks of the target and of the draft.
    """

    ours: Marks | None
    theirs: Marks | None

    def state(self, pieces: TokenBytes, prompt: Sequence[int]) -> str:
        """What the last token says that is no white space; a target without marks does
        not think. pieces: of the target."""
        if self.ours is None:
            return "closed"
        for token in reversed(prompt[-8:]):
            if token in self.ours.ids:
                return "open" if token == self.ours.ids[0] else "closed"
            if pieces[token].strip():
                return ""
        return ""

    def fit(self, prompt: str, state: str) -> str:
        """The draft's prompt with thinking left as in the target's."""
        marks = self.theirs
        if marks is None:
            return prompt
        base = prompt.rstrip()
        if base.endswith(marks.closing):
            before, found, _ = base.rpartition(marks.opening)
            if not found:
                return prompt
            base = before
        elif base.endswith(marks.opening):
            base = base.removesuffix(marks.opening)
        else:
            base = prompt
        if state == "open":
            return f"{base}{marks.opening}\n"
        if state == "closed" and marks.in_template:
            return f"{base}{marks.opening}\n\n{marks.closing}\n\n"
        return base
