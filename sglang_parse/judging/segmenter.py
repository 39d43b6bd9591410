"""Cut a draft into segments: token offsets after which the target judges the prefix.

What a token id decides alone (holds a line break, may end a sentence, is blank) is in a
table over the vocabulary, built once. What it cannot decide (is this "." a decimal
point, does the next line open a step) is read from the text around those tokens; see
prose.py and code.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sglang_parse.judging.code import code_boundaries
from sglang_parse.judging.draft_text import DraftText, num_blank, token_flags
from sglang_parse.judging.extension_rules import SegmentRule, load_rule
from sglang_parse.judging.prose import (
    line_boundaries,
    paragraph_boundaries,
    sentence_boundaries,
    step_boundaries,
)
from sglang_parse.judging.special_tokens import special_ids
from sglang_parse.options.segmenters import check_segmenter, parse_fixed_segmenter

# Tokens of a segment not ended yet that the rules of text look back at.
REACH = 512

# Built-in rules, and those of installed packages that were asked for.
RULES: dict[str, SegmentRule] = {
    "line": line_boundaries,
    "paragraph": paragraph_boundaries,
    "sentence": sentence_boundaries,
    "step": step_boundaries,
    "code": code_boundaries,
}


def build_token_texts(tokenizer: Any) -> list[str]:
    """Decoded text of every id of a Hugging Face tokenizer, leading spaces included.

    Special tokens and unused ids give "", bytes of a cut character U+FFFD. Every token
    is decoded behind an anchor, since sentencepiece-like decoders drop the space of a
    first token.
    """
    added = getattr(tokenizer, "added_tokens_decoder", {})
    size = max([len(tokenizer), *(i + 1 for i in added)])
    special = special_ids(tokenizer)
    pieces = tokenizer.convert_ids_to_tokens(list(range(size)))
    anchor = tokenizer.convert_ids_to_tokens(
        tokenizer.encode("a", add_special_tokens=False)
    )
    skip = len(tokenizer.convert_tokens_to_string(anchor))

    def text(i: int, piece: str | None) -> str:
        if piece is None or i in special:
            return ""
        if i in added:
            return str(added[i].content)
        decoded: str = tokenizer.convert_tokens_to_string([*anchor, piece])
        return decoded[skip:]

    return [text(i, piece) for i, piece in enumerate(pieces)]


class Segmenter:
    """Finds the boundaries of one draft after another; holds tables, no state.

    name: `line`, `paragraph`, `sentence`, `step`, `code`, `fixed:N` or the name that an
        installed package gave its own.
    token_texts: text of every token id, from build_token_texts; larger ids (padding of
        the model's vocabulary) count as "".
    Raises ValueError on an unknown name, and where a package's rule cannot be loaded.
    """

    def __init__(self, name: str, token_texts: Sequence[str]) -> None:
        self.name = check_segmenter(name, "segmenter")
        self._fixed = parse_fixed_segmenter(name)
        if not self._fixed and name not in RULES:
            RULES[name] = load_rule(name)
        self.reach = self._fixed or REACH
        # The last entry stands for every id beyond the table; `fixed` reads no texts.
        self._texts = [] if self._fixed else [*token_texts, ""]
        self._flags = b"" if self._fixed else token_flags(self._texts)

    def boundaries(
        self,
        tokens: Sequence[int],
        *,
        ended: bool,
        max_segments: int,
        previous_text: str = "",
        settled: bool = False,
    ) -> tuple[int, ...]:
        """Boundaries of a draft, increasing, at most max_segments of them.

        tokens: draft token ids without the end token. ended: the draft stopped at the
        end of the response, so its end is a boundary; otherwise an unfinished tail has
        none, and a draft that is all tail gives (). previous_text: the last ~200
        characters committed before the draft. settled: a sentence ends only where the
        next is seen to begin, after the token that shows it, and `step` cuts no line
        of a step into sentences.

        A boundary lies after the token that holds the end of the terminator; a line
        break belongs to the segment before it, and so do letters of the next segment
        that share its token (".\\nStep"). A blank segment joins the one before it, at
        the start of the draft the one after it. Of k > max_segments boundaries number
        floor(j * k / max_segments), j = 1..max_segments, are kept: evenly spread, the
        last one always, and neighbouring segments merge.
        """
        if max_segments < 1:
            raise ValueError(f"max_segments is {max_segments}; expected at least 1.")
        n = len(tokens)
        if not n:
            return ()
        if self._fixed:
            cuts = list(range(self._fixed, n + 1, self._fixed))
            if ended and (not cuts or cuts[-1] != n):
                cuts.append(n)
        else:
            pieces, flags = self._look_up(tokens)
            found = RULES[self.name](
                DraftText(pieces, flags, previous_text, ended, settled)
            )
            cuts = _join_blank({*found, n} if ended else found, flags)
            if ended and not cuts:
                cuts = [n]
        return thin(cuts, max_segments)

    def _look_up(self, tokens: Sequence[int]) -> tuple[list[str], bytes]:
        """Text and flags of every token."""
        texts, flags = self._texts, self._flags
        try:
            return [texts[i] for i in tokens], bytes([flags[i] for i in tokens])
        except IndexError:
            last = len(texts) - 1
            return self._look_up([min(i, last) for i in tokens])


def _join_blank(found: Iterable[int], flags: bytes) -> list[int]:
    """Sort the boundaries and merge segments that show nothing (see boundaries)."""
    cuts: list[int] = []
    start = 0
    for b in sorted(found):
        if num_blank(flags[start:b]) < b - start:
            cuts.append(b)
        elif cuts:
            cuts[-1] = b
        start = cuts[-1] if cuts else 0
    return cuts


def thin(cuts: Sequence[int], max_segments: int) -> tuple[int, ...]:
    k = len(cuts)
    if k <= max_segments:
        return tuple(cuts)
    return tuple(cuts[j * k // max_segments - 1] for j in range(1, max_segments + 1))
