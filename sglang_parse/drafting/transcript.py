"""One text in a draft's own tokens, kept up to date from where it changed.

The text is what is known of a request, followed by what the draft has written. It is
never encoded twice as a whole: where the target decides otherwise, ids are made again
from a checkpoint a few tokens before.
"""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Sequence

from sglang_parse.drafting.text_bridge import TextEncoder, unfinished

# Tokens before a change that are made again with it: they may join with what follows.
LOOKBACK = 8
# Tokens before those in which a checkpoint is looked for.
SEARCH = 128
# Characters that are encoded at a time where tokens do not write their text.
MAX_CHUNK = 256

# What may stand before a token.
WORD, INSIDE, NOWHERE = 1, 0, 2
_CHUNKS = re.compile(rf".{{32,{MAX_CHUNK}}}?(?<=\S)(?=\s\S)|.{{1,{MAX_CHUNK}}}", re.S)


class Transcript:
    """ids: of the text's whole characters. ends: byte offset behind each."""

    def __init__(self, encoder: TextEncoder) -> None:
        """encoder: of the draft."""
        self.encoder = encoder
        self.text = bytearray()
        self.ids: list[int] = []
        self.ends: list[int] = []
        #: Whether text may be encoded from here on: WORD, INSIDE a word, NOWHERE.
        self._places = bytearray()
        #: Leading ids that have not changed since this was last set.
        self.num_kept = 0

    def follow(self, start: int, known: bytes) -> bool:
        """The text from byte `start` on begins with `known`.

        What the draft wrote behind it stays where it wrote the same. False where it did
        not, and the text now ends with `known`. start: at most the length of the text.
        """
        written = self.text[start : start + len(known)]
        if written == known:
            return True
        agreed = start + common_length(written, known)
        end = start + len(known)
        if agreed == len(self.text):
            self.text += known[agreed - start :]
        else:
            self.text[agreed:] = known[agreed - start :]
        assert len(self.text) == end
        self._encode_again(agreed)
        return False

    def append(self, tokens: Sequence[int]) -> int:
        """The draft goes on with these tokens; how many of them are text.

        They end at a token that is a marker. None are taken where they do not begin
        with the bytes of a character that is already known in part.
        """
        pieces = self.encoder.pieces
        end = self.ends[-1] if self.ends else 0
        part = bytes(self.text[end:])
        num = next(
            (
                k
                for k, token in enumerate(tokens)
                if token in pieces.special or not pieces[token]
            ),
            len(tokens),
        )
        if part and not pieces.join(tokens[:num]).startswith(part):
            return 0
        del self.text[end:]
        for token in tokens[:num]:
            piece = pieces[token]
            begins_word = piece[:1].isspace() and not self.text[-1:].isspace()
            self._places.append(WORD if begins_word else INSIDE)
            self.text += piece
            self.ids.append(token)
            self.ends.append(len(self.text))
        return num

    def _encode_again(self, agreed: int) -> None:
        """Make the ids again behind a change at byte `agreed`."""
        first = self._checkpoint(bisect_right(self.ends, agreed))
        self.num_kept = min(self.num_kept, first)
        start = self.ends[first - 1] if first else 0
        del self.ids[first:], self.ends[first:], self._places[first:]
        text = bytes(self.text[start : len(self.text) - unfinished(self.text)])
        if not text or self._add(text, start):
            return
        for chunk in _CHUNKS.findall(text.decode(errors="surrogateescape")):
            part = chunk.encode(errors="surrogateescape")
            if not self._add(part, start):
                self._add_otherwise(part, start + len(part))
            start += len(part)

    def _checkpoint(self, num: int) -> int:
        """Where to encode again from, of the first `num` ids: at a word if there is
        one near."""
        last = num - LOOKBACK
        for k in range(last, max(0, last - SEARCH), -1):
            if self._places[k] == WORD:
                return k
        while last > 0 and not self._may_begin(last):
            last -= 1
        return max(0, last)

    def _may_begin(self, k: int) -> bool:
        at = self.ends[k - 1]
        return self._places[k] != NOWHERE and not 0x80 <= self.text[at] < 0xC0

    def _add(self, text: bytes, start: int) -> bool:
        """Encode a text that begins at byte `start`. False, and nothing is added, where
        its tokens do not write it: its bytes are broken, or its characters are changed
        before they are encoded."""
        try:
            ids, words = self.encoder.encode(text.decode("utf-8"))
        except UnicodeDecodeError:
            return False
        pieces = [self.encoder.pieces[i] for i in ids]
        if b"".join(pieces) != text:
            return False
        before: int | None = -1
        previous = b"\n"
        for token, word, piece in zip(ids, words, pieces, strict=True):
            start += len(piece)
            begins = word != before or (
                piece[:1].isspace() and not previous[-1:].isspace()
            )
            before, previous = word, piece
            self.ids.append(token)
            self.ends.append(start)
            self._places.append(WORD if begins else INSIDE)
        return True

    def _add_otherwise(self, text: bytes, end: int) -> None:
        """Ids of a text that they do not write; it can be cut before them alone."""
        ids, _ = self.encoder.encode(text.decode(errors="replace"))
        self.ids += ids
        self.ends += [end] * len(ids)
        self._places += bytes([INSIDE, *[NOWHERE] * len(ids)][: len(ids)])


def common_length(a: bytes | bytearray, b: bytes | bytearray) -> int:
    """Bytes that two texts have in common at their beginnings."""
    end = min(len(a), len(b))
    if a[:end] == b[:end]:
        return end
    return next(k for k in range(end) if a[k] != b[k])
