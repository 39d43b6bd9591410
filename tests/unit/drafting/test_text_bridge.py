"""Text between two token spaces: nothing is lost or changed on the way."""

from __future__ import annotations

import random
import time

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from sglang_parse.drafting.text_bridge import (
    DraftWriter,
    TextEncoder,
    TextError,
    TokenBytes,
    unfinished,
    whole_characters,
)
from sglang_parse.drafting.transcript import LOOKBACK, Transcript, common_length
from tests.support import tokenizer_kinds as tokenizers

NUM_ROUND_TRIPS = 20_000
KINDS = {
    "embedded": tokenizers.embedded,
    "qwen-like": tokenizers.byte_level,
    "small": lambda: tokenizers.byte_level(300),
    "nfc": lambda: tokenizers.byte_level(nfc=True),
    "sentencepiece": tokenizers.sentencepiece,
}
# Emoji with joiners, combining marks, CJK, right to left, spaces and markers of all
# kinds.
PARTS = [
    "The", " quick", " fox", "Step 1:", " had 12", "\n", "\n\n", "  ", " ", "\t", "'ll",
    "12345", "👩‍👩‍👧‍👦", "👍🏽", "🏳️‍🌈", "e\u0301", "a\u0308\u0323", "好", "天气", "，",
    "שלום", " مرحبا", "\u200f", "\u00a0", "\r\n", "ﬁ", "Ω", "\ufeff", "\ufffd", "\x00",
    "<|x|>", "<|im_end", "|>", "ß", "İ", "한국어", "🇩🇪", "\u2028",
]  # fmt: skip


@pytest.fixture(scope="module")
def encoders():
    return {name: TextEncoder(make()) for name, make in KINDS.items()}


def random_text(rng: random.Random, parts: int) -> str:
    return "".join(
        rng.choice(PARTS)
        if rng.random() < 0.9
        else chr(
            rng.choice((rng.randrange(32, 0xD800), rng.randrange(0xE000, 0x10FFFF)))
        )
        for _ in range(rng.randint(0, parts))
    )


def random_bytes(rng: random.Random, parts: int) -> bytes:
    """Text, now and then with bytes that are no character."""
    text = random_text(rng, parts).encode()
    if rng.random() < 0.1 and text:
        at = rng.randrange(len(text))
        text = text[:at] + rng.randbytes(rng.randint(1, 3)) + text[at:]
    return text


@pytest.mark.parametrize("kind", KINDS)
def test_tokens_write_their_text(kind, encoders):
    """Red if a token's bytes are not those that the tokenizer decodes it to."""
    tokenizer, encoder = KINDS[kind](), encoders[kind]
    text = "Step 1: The quick fox had 12, so now"
    ids, words = encoder.encode(text)
    assert encoder.pieces.join(ids) == text.encode() and len(words) == len(ids)
    assert tokenizer.decode(ids) == text
    assert encoder.pieces[10**6] == encoder.pieces[-1] == b""
    assert tokenizer.eos_token_id in encoder.pieces.special


def test_a_tokenizer_that_hides_its_bytes_is_refused():
    """Red if drafts of such a model come out as other text."""
    backend = Tokenizer(models.WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>")
    with pytest.raises(TextError, match="its decoder is none"):
        TokenBytes(wrapped)
    with pytest.raises(TextError, match="lists no vocabulary"):
        TokenBytes(object())


@pytest.mark.parametrize("kind", KINDS)
def test_random_texts_come_back_whole(kind, encoders):
    """Red if drafted text reaches the target changed, or a target's text the draft.

    Each trip is one answer: the target commits tokens, the draft's transcript follows,
    the draft writes on in its own tokens, and the target gets those as its own. All
    that is committed at the end is the text that was meant.
    """
    rng = random.Random(kind)
    names = list(KINDS)
    num_other = 0
    for trip in range(NUM_ROUND_TRIPS // len(KINDS)):
        target = encoders[names[trip % len(names)]]
        other = trip_of(rng, encoders[kind], target)
        num_other += other
    assert num_other > NUM_ROUND_TRIPS // len(KINDS) // 4


def trip_of(rng: random.Random, draft: TextEncoder, target: TextEncoder) -> bool:
    """One answer; whether drafts had a part in it."""
    meant = random_bytes(rng, 8)
    writer, transcript = DraftWriter(target), Transcript(draft)
    prompt = random_bytes(rng, 4)
    transcript.follow(0, prompt)
    done, drafted = 0, False
    while done < len(meant):
        known = prompt + meant[:done]
        # Now and then the draft is wrong.
        rest = meant[done:] if rng.random() < 0.8 else random_bytes(rng, 3)
        cut = rng.randint(0, len(rest))
        readable = rest[unread(transcript, known) :].decode("utf-8", errors="ignore")
        part = bytes(transcript.text[len(covered(transcript)) :])
        ids, _ = draft.encode((part.decode("utf-8", errors="ignore") + readable)[:cut])
        transcript.append(ids)
        text = bytes(transcript.text)
        assert text.startswith(known)
        leftover = text[len(known) :]
        tokens = writer.write(leftover, most=64, whole=rng.random() < 0.5)
        written = target.pieces.join(tokens)
        assert leftover.startswith(written)
        assert not target.pieces.special & set(tokens)
        kept = common_length(written, meant[done:])
        drafted |= kept > 0
        # The target's own token: it may end inside a character.
        done = min(len(meant), done + kept + rng.randint(1, 3))
        transcript.follow(len(known), meant[len(known) - len(prompt) : done])
        check_transcript(transcript, prompt + meant[:done])
    return drafted


def unread(transcript: Transcript, known: bytes) -> int:
    """Bytes of what comes that the transcript has drafted already."""
    return max(0, len(transcript.text) - len(known))


def covered(transcript: Transcript) -> bytes:
    end = transcript.ends[-1] if transcript.ends else 0
    return bytes(transcript.text[:end])


def check_transcript(transcript: Transcript, known: bytes) -> None:
    assert bytes(transcript.text[: len(known)]) == known
    assert len(transcript.ids) == len(transcript.ends) == len(transcript._places)
    assert sorted(transcript.ends) == transcript.ends
    assert len(transcript.text) - len(covered(transcript)) == unfinished(
        transcript.text
    )
    # Where the tokens can write the text, they do.
    text = covered(transcript)
    pieces = transcript.encoder.pieces
    if 2 not in transcript._places and b"\xef\xbf\xbd" not in pieces.join(
        transcript.ids
    ):
        assert pieces.join(transcript.ids) == text


@pytest.mark.parametrize("kind", ["embedded", "qwen-like", "small"])
def test_ids_made_in_parts_are_those_of_the_whole(kind, encoders):
    """Red if a draft reads a text in other tokens than it was trained on."""
    rng = random.Random(7)
    encoder = encoders[kind]
    for _ in range(200):
        text = random_text(rng, 60)
        data, at = text.encode(), 0
        transcript = Transcript(encoder)
        while at < len(data):
            end = at + rng.randint(1, 30)
            transcript.follow(at, data[at:end])
            at = min(end, len(data))
        assert transcript.ids == encoder.encode(text)[0]


def test_only_what_changed_is_encoded_again(encoders, monkeypatch):
    """Red if the cost of a round grows with the length of the answer."""
    encoder = encoders["qwen-like"]
    encode, lens = encoder.encode, []

    def counted(text: str):
        lens.append(len(text))
        return encode(text)

    monkeypatch.setattr(encoder, "encode", counted)
    rng = random.Random(3)
    for make in (
        lambda: rng.choice(["The quick", " fox", ".\n", " 12345", " naïve"]),
        lambda: "天气很好今"[: rng.randint(1, 5)],  # no space anywhere
        lambda: "e\u0301",
    ):
        lens.clear()
        transcript, at = Transcript(encoder), 0
        while at < 100_000:
            part = "".join(make() for _ in range(20)).encode()
            transcript.follow(at, part)
            at += len(part)
        assert max(lens) < 1500 and sum(lens) < 5 * at


def test_what_was_drafted_stays_as_it_was_drafted(encoders):
    """Red if the draft has to read again what it wrote itself."""
    encoder = encoders["embedded"]
    transcript = Transcript(encoder)
    transcript.follow(0, b"Step 1: Tom")
    own = encoder.pieces.ids[b"S"], encoder.pieces.ids[b"t"], encoder.pieces.ids[b"e"]
    transcript.num_kept = len(transcript.ids)
    num = len(transcript.ids)
    transcript.append(own)
    assert transcript.follow(11, b"St") and transcript.ids[num:] == list(own)
    assert not transcript.follow(11, b"Sto")
    assert bytes(transcript.text) == b"Step 1: TomSto"
    # Only a few tokens before the change were made again.
    assert transcript.num_kept >= num - LOOKBACK - 4
    assert transcript.ids == encoder.encode("Step 1: TomSto")[0]


def test_a_draft_inside_a_character_has_to_go_on_with_it(encoders):
    """Red if half a character of the target is followed by anything else."""
    encoder = encoders["embedded"]
    transcript = Transcript(encoder)
    transcript.follow(0, b"Tom " + "好".encode()[:1])
    assert transcript.append(encoder.encode(" had")[0]) == 0
    assert bytes(transcript.text) == b"Tom " + "好".encode()[:1]
    assert transcript.append(encoder.encode("好 had")[0])
    rest = bytes(transcript.text)[5:]
    ids = DraftWriter(encoder).write(rest, most=99, whole=True)
    assert encoder.pieces.join(ids) == "好 had".encode()[1:]


def test_markers_end_a_draft(encoders):
    """Red if a draft's text closes the target's turn."""
    encoder = encoders["embedded"]
    writer = DraftWriter(encoder)
    ids = writer.write(b"Tom had<|im_end|> 3", most=99, whole=True)
    assert encoder.pieces.join(ids) == b"Tom had"
    transcript = Transcript(encoder)
    stop = encoder.encode("<|im_end|>")[0]
    assert transcript.append([*encoder.encode("Tom")[0], *stop, 70]) == 1
    assert bytes(transcript.text) == b"Tom"


def test_last_word_and_character_wait(encoders):
    """Red if a word is cut in two for the target, or half a character is sent."""
    for name in ("embedded", "sentencepiece"):
        writer = DraftWriter(encoders[name])
        join = encoders[name].pieces.join
        assert join(writer.write(b"Tom had fo", most=99, whole=False)) == b"Tom had"
        assert join(writer.write(b"Tom had fo", most=99, whole=True)) == b"Tom had fo"
        broken = "Tom had 好".encode()[:-1]
        assert join(writer.write(broken, most=99, whole=True)) == b"Tom had "
        assert join(writer.write(b"Tom had fox", most=1, whole=True))
    assert writer.write(b"", most=9, whole=False) == []


def test_characters_are_told_from_parts():
    """Red if bytes are taken for a character that they do not finish."""
    for text in ("a", "é", "好", "👍", "a👍", ""):
        data = text.encode()
        assert whole_characters(data) == data and unfinished(data) == 0
        for cut in range(1, len(text[-1:].encode())):
            assert unfinished(data[:-cut]) == len(text[-1].encode()) - cut
            assert whole_characters(data[:-cut]) == text[:-1].encode()
    assert unfinished(b"\x80") == unfinished(b"\xff" * 9 + b"a") == 0


def test_retokenising_is_quick(encoders):
    """Red if it is a hundred times slower than it should be: 256 tokens take well
    under a millisecond on an idle core."""
    writer = DraftWriter(encoders["qwen-like"])
    text = ("The quick brown fox had 12, so now it's naïve.\n" * 20).encode()
    times = []
    for _ in range(5):
        start = time.perf_counter()
        writer.write(text, most=256, whole=False)
        times.append(time.perf_counter() - start)
    assert min(times) < 0.1
