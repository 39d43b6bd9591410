"""How a tokenizer names its tokens: as bytes in letters, or as sentencepiece does."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

#: Sentencepiece writes a space so.
SPACE = "\u2581"


class TextError(ValueError):
    """A tokenizer whose tokens cannot be taken for text; the end of a sentence."""


def reader_of(tokenizer: Any) -> Callable[[str], bytes]:
    """What reads the name of a token as bytes. Raises TextError."""
    if not getattr(tokenizer, "is_fast", False):
        try:
            vocab = tokenizer.get_vocab()
        except AttributeError as e:
            raise TextError("it lists no vocabulary") from e
        if "<0x0A>" in vocab or SPACE in vocab:
            return _sentencepiece
        if BYTES.keys() <= vocab.keys():
            return _byte_level
        raise TextError("it is in Python, neither byte-level nor sentencepiece")
    decoder = decoder_types(tokenizer.backend_tokenizer)
    if "ByteLevel" in decoder:
        return _byte_level
    if {"ByteFallback", "Metaspace", "Replace"} & decoder:
        return _sentencepiece
    raise TextError(
        f"its decoder is {', '.join(sorted(decoder)) or 'none'}, which is neither "
        "byte-level nor sentencepiece"
    )


def decoder_types(backend: Any) -> set[str]:
    """Types of a Rust tokenizer's decoder and of its parts."""
    state = backend.decoder
    if state is None:
        return set()
    return _types(json.loads(state.__getstate__()))


def _types(state: Any) -> set[str]:
    found = {state["type"]}
    for part in state.get("decoders", ()):
        found |= _types(part)
    return found


def _bytes_to_chars() -> dict[str, int]:
    """GPT-2's writing of bytes: printable ones stand for themselves."""
    kept = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [b for b in range(256) if b not in kept]
    table = {chr(b): b for b in kept}
    return table | {chr(256 + n): b for n, b in enumerate(rest)}


BYTES = _bytes_to_chars()


def _byte_level(piece: str) -> bytes:
    try:
        return bytes(BYTES[c] for c in piece)
    except KeyError:
        return piece.encode()


def _sentencepiece(piece: str) -> bytes:
    if len(piece) == 6 and piece.startswith("<0x") and piece.endswith(">"):
        try:
            return bytes([int(piece[3:5], 16)])
        except ValueError:
            pass
    return piece.replace(SPACE, " ").encode()
