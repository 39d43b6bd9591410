"""Tokenizers in Python: sentencepiece's own, and tiktoken's as remote code has it."""

from __future__ import annotations

import io
from types import SimpleNamespace

import pytest
import sentencepiece
import tiktoken
from tokenizers import AddedToken
from transformers import PreTrainedTokenizer
from transformers.tokenization_utils_sentencepiece import SentencePieceBackend

from sglang_parse.drafting.text_bridge import DraftWriter, TextEncoder
from sglang_parse.drafting.token_names import BYTES, TextError
from sglang_parse.drafting.transcript import Transcript
from sglang_parse.plugin.model_checks import check_draft_tokenizer
from tests.support import tokenizer_kinds as kinds

TEXTS = (
    "Step 1: Tom had 12, so now 16.\n\nAnswer: 16",
    "naïve 你好 👍🏽 שלום\n\tprint('ok')  # done",
    " begins with a space",
)


@pytest.fixture(scope="module")
def sentences(tmp_path_factory):
    """A sentencepiece tokenizer that transformers has no Rust form of."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(kinds.CORPUS * 20), model_writer=model,
        vocab_size=400, model_type="bpe", byte_fallback=True,
        normalization_rule_name="identity", remove_extra_whitespaces=False,
        hard_vocab_limit=False, minloglevel=2,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("sp") / "tokenizer.model"
    path.write_bytes(model.getvalue())
    return SentencePieceBackend(vocab_file=str(path), legacy=False, unk_token="<unk>")


class Tiktoken(PreTrainedTokenizer):
    """As Kimi's: names of tokens in GPT-2's letters, ids from tiktoken."""

    def __init__(self, **kwargs) -> None:
        pairs = [(a + b).encode() for a in "aeiou t" for b in "nrst e"]
        ranks = {bytes([b]): b for b in range(256)}
        ranks |= {text: 256 + k for k, text in enumerate(dict.fromkeys(pairs))}
        self.model = tiktoken.Encoding(
            "small", pat_str=r"\s?\w+|\s|[^\w\s]+", mergeable_ranks=ranks,
            special_tokens={"<end>": 400},
        )  # fmt: skip
        letters = {b: c for c, b in BYTES.items()}
        self.names = {"".join(letters[b] for b in t): i for t, i in ranks.items()}
        super().__init__(eos_token=AddedToken("<end>", special=True), **kwargs)

    @property
    def vocab_size(self) -> int:
        return 400

    def get_vocab(self):
        return self.names | self.added_tokens_encoder

    def _convert_id_to_token(self, index):
        return {i: name for name, i in self.names.items()}.get(index)

    def _convert_token_to_id(self, token):
        return self.names.get(token)

    def encode(self, text, add_special_tokens=True, **kwargs):
        return self.model.encode(text, allowed_special="all")


@pytest.fixture(params=["sentencepiece", "tiktoken"])
def draft(request):
    if request.param == "tiktoken":
        return Tiktoken()
    return request.getfixturevalue("sentences")


def test_a_draft_in_python_writes_for_the_target(draft):
    """Red if its text does not come back, or cannot be handed over."""
    assert not draft.is_fast
    target = kinds.embedded()
    assert not check_draft_tokenizer(target, draft).shares_ids
    encoder, writer = TextEncoder(draft), DraftWriter(TextEncoder(target))
    for text in TEXTS:
        transcript = Transcript(encoder)
        transcript.follow(0, b"Q:\n")
        transcript.follow(3, text.encode())
        assert encoder.pieces.join(transcript.ids) == b"Q:\n" + text.encode()
        own = Transcript(encoder)
        own.follow(0, b"Q:\n")
        ids = transcript.ids[len(own.ids) :]
        assert own.append(ids) == len(ids) and own.text == transcript.text
        written = writer.write(text.encode(), most=500, whole=True)
        assert writer.pieces.join(written) == text.encode()


class Strange(Tiktoken):
    """Writes other letters than it reads."""

    def encode(self, text, add_special_tokens=True, **kwargs):
        return self.model.encode(text.lower())


class Failing(Tiktoken):
    def encode(self, text, add_special_tokens=True, **kwargs):
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (Strange, "its tokens do not write their text"),
        (Failing, "it is in Python and fails"),
    ],
)
def test_another_is_refused_with_one_that_works(made, message):
    """Red if a draft whose text is lost is served, or nobody says what would do."""
    tokenizer = Tiktoken()
    tokenizer.__class__ = made
    with pytest.raises(TextError, match=message):
        TextEncoder(tokenizer)
    if made is Strange:
        with pytest.raises(
            ValueError, match=r"draft's .*such as Qwen/Qwen3-0.6B works"
        ):
            check_draft_tokenizer(kinds.embedded(), tokenizer)


def test_a_tokenizer_without_a_vocabulary_is_refused():
    """Red if SGLang's own tiktoken class ends the start with a traceback."""
    with pytest.raises(TextError, match="lists no vocabulary"):
        TextEncoder(SimpleNamespace(is_fast=False))
