"""Whether a prompt has the model think, and a draft's own prompt that does the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sglang_parse.judging.special_tokens import THINKING_PAIRS

if TYPE_CHECKING:
    from sglang_parse.drafting.text_bridge import TokenBytes


@dataclass(frozen=True)
class ThinkingMarks:
    """What one tokenizer writes around thinking, a token each."""

    opening: str
    closing: str
    ids: tuple[int, int]
    #: Whether the tokenizer's chat template knows them.
    in_template: bool = False

    def fit(self, prompt: str, state: str) -> str:
        """A prompt that leaves thinking in this state (`thinking_state`)."""
        base = prompt.rstrip()
        if base.endswith(self.closing):
            before, found, _ = base.rpartition(self.opening)
            if not found:
                return prompt
            base = before
        elif base.endswith(self.opening):
            base = base.removesuffix(self.opening)
        else:
            base = prompt
        if state == "open":
            return f"{base}{self.opening}\n"
        if state == "closed" and self.in_template:
            return f"{base}{self.opening}\n\n{self.closing}\n\n"
        return base


def marks_of(tokenizer: Any) -> ThinkingMarks | None:
    """A tokenizer's marks; None where it has none that are a token each."""
    vocab = tokenizer.get_added_vocab()
    for opening, closing in THINKING_PAIRS:
        if opening in vocab and closing in vocab:
            template = str(getattr(tokenizer, "chat_template", None) or "")
            ids = vocab[opening], vocab[closing]
            return ThinkingMarks(opening, closing, ids, closing in template)
    return None


def closing_ids(tokenizer: Any) -> frozenset[int]:
    """The token that ends thinking, where a tokenizer has one."""
    marks = marks_of(tokenizer)
    return frozenset(marks.ids[1:]) if marks else frozenset()


def thinking_state(
    marks: ThinkingMarks | None, pieces: TokenBytes, prompt: Sequence[int]
) -> str:
    """How a prompt leaves thinking: "open", "closed", or "" where it does not say. The
    last token decides that is no white space; a target without marks does not think.

    marks, pieces: of the target.
    """
    if marks is None:
        return "closed"
    for token in reversed(prompt[-8:]):
        if token in marks.ids:
            return "open" if token == marks.ids[0] else "closed"
        if pieces[token].strip():
            return ""
    return ""
