"""Text between two token spaces: tokens as bytes, and drafted text as target tokens.

Texts are bytes, since a token may hold part of a character. Nothing here knows who
drafts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from sglang_parse.drafting.token_names import TextError, reader_of
from sglang_parse.judging.special_tokens import THINKING_MARKS, special_ids

# What a tokenizer in Python has to write again at start-up.
SAMPLE = "Step 1: 3.14 + 2,718 = 12345\n\tIt's naïve – 你好, привет 👍🏽. Yes"
# Put before a text whose tokenizer puts a space before the first word.
ANCHOR = "\n"


class TokenBytes:
    """What each id of a tokenizer writes.

    Raises TextError where the tokenizer does not say.
    """

    def __init__(self, tokenizer: Any) -> None:
        """tokenizer: a Hugging Face one, with a Rust backend or in Python."""
        read = reader_of(tokenizer)
        added = tokenizer.added_tokens_decoder
        marks = {i for i, t in added.items() if str(t.content) in THINKING_MARKS}
        special = special_ids(tokenizer) - marks
        size = max([len(tokenizer), *(i + 1 for i in added)])
        #: Ids that stand for no text: turns, ends, padding.
        self.special = special
        self._of: list[bytes] = []
        for i, piece in enumerate(tokenizer.convert_ids_to_tokens(list(range(size)))):
            if piece is None:
                self._of.append(b"")
            elif i in added:
                self._of.append(str(added[i].content).encode())
            else:
                self._of.append(read(piece))

        #: Ids by what they write; of equal ones the first.
        self.ids = {
            text: i
            for i, text in reversed(list(enumerate(self._of)))
            if text and i not in added
        }

    def __getitem__(self, token: int) -> bytes:
        """Of a special token its name; of an id beyond the vocabulary nothing."""
        return self._of[token] if 0 <= token < len(self._of) else b""

    def join(self, tokens: Iterable[int]) -> bytes:
        return b"".join(map(self.__getitem__, tokens))


class TextEncoder:
    """Text -> ids of one tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self.pieces = TokenBytes(tokenizer)
        is_fast = getattr(tokenizer, "is_fast", False)
        self._backend = tokenizer.backend_tokenizer if is_fast else None
        self._tokenizer = tokenizer
        first, _ = self._read(SAMPLE)
        self._anchor: list[int] = []
        if first and self.pieces[first[0]].startswith(b" "):
            self._anchor = self._read(ANCHOR)[0]
        if not is_fast and self.pieces.join(first).strip() != SAMPLE.encode():
            raise TextError("it is in Python, and its tokens do not write their text")

    def encode(self, text: str) -> tuple[list[int], list[int | None]]:
        """Ids of a text that something precedes, and the word that each is in.

        Words are what the tokenizer never joins; they are numbered. Markers in the text
        become the tokens that they name.
        """
        anchor = self._anchor
        ids, words = self._read(ANCHOR + text if anchor else text)
        if anchor:
            if ids[: len(anchor)] == anchor:
                return ids[len(anchor) :], words[len(anchor) :]
            return self._read(text)
        return ids, words

    def _read(self, text: str) -> tuple[list[int], list[int | None]]:
        """Ids and words. A tokenizer in Python knows no words."""
        if self._backend is None:
            try:
                ids = list(self._tokenizer.encode(text, add_special_tokens=False))
            except Exception as e:
                raise TextError(
                    f"it is in Python and fails ({type(e).__name__})"
                ) from e
            return ids, [0] * len(ids)
        found = self._backend.encode(text, add_special_tokens=False)
        return found.ids, found.word_ids


class DraftWriter:
    """Drafted text -> ids of the target that write exactly this text.

    encoder: of the target.
    """

    def __init__(self, encoder: TextEncoder) -> None:
        self.encoder = encoder
        self.pieces = encoder.pieces

    def write(self, text: bytes, *, most: int, whole: bool) -> list[int]:
        """Ids of a text that follows a target token, at most `most`.

        They end before a marker of the target, a broken character, or an id that would
        write anything else. whole: the text is complete; otherwise its last word and
        its last character may continue, and are held back.
        """
        starts = (k for k, byte in enumerate(text) if not 0x80 <= byte < 0xC0)
        start = next(starts, len(text))  # before it: a character that has begun
        first = self._spelled(text[:start])
        if first is None or (start == len(text) < 4 and not whole):
            return []
        return [*first, *self._encoded(text[start:], whole=whole)][:most]

    def _spelled(self, part: bytes) -> list[int] | None:
        """Ids of some bytes of a character, the longest tokens first; None where the
        target has none."""
        known, ids = self.pieces.ids, []
        while part:
            end = next((n for n in range(len(part), 0, -1) if part[:n] in known), 0)
            if not end:
                return None
            ids.append(known[part[:end]])
            part = part[end:]
        return ids

    def _encoded(self, text: bytes, *, whole: bool) -> list[int]:
        readable = whole_characters(text).decode("utf-8")
        if not readable:
            return []
        ids, words = self.encoder.encode(readable)
        if not whole:
            ids = ids[: last_word(words, [self.pieces[i] for i in ids])]
        at = 0
        for k, token in enumerate(ids):
            piece = self.pieces[token]
            is_text = piece and token not in self.pieces.special
            if not is_text or not text.startswith(piece, at):
                return ids[:k]
            at += len(piece)
        return ids


def last_word(words: Sequence[int | None], texts: Sequence[bytes]) -> int:
    """Where the last word begins, as an offset into its tokens.

    words: the word of each token. texts: what each writes. A tokenizer that knows no
    words has one; then a space begins a word.
    """
    if not words:
        return 0
    k = len(words) - 1
    while k > 0 and words[k - 1] == words[k] and texts[k][:1] not in (b" ", b"\n"):
        k -= 1
    return k


def whole_characters(text: bytes) -> bytes:
    """The leading part that is whole characters of UTF-8."""
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as e:
        return text[: e.start]
    return text


def unfinished(text: bytes | bytearray) -> int:
    """Bytes at the end that begin a character without ending it, 0 to 3."""
    for back in range(1, min(4, len(text) + 1)):
        byte = text[-back]
        if byte >= 0xC0:
            width = 2 if byte < 0xE0 else 3 if byte < 0xF0 else 4
            return back if back < width else 0
        if byte < 0x80:
            return 0
    return 0
