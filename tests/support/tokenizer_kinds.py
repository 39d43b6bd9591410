"""Tokenizers of different kinds, built from nothing."""

from __future__ import annotations

import json
import random
from functools import lru_cache

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from sglang_parse.embedded import TARGET_PATH

END = "<|im_end|>"
QWEN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|"
    r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CORPUS = [
    "The quick brown fox jumps over the lazy dog. It's naïve, isn't it?\n\n",
    "def f(x):\n    return x + 12345\n\n\tprint('ok')  # done\n",
    "你好，世界。今天天气很好。привет мир, שלום עולם، مرحبا بالعالم\n",
    "Step 1: Tom had 12 and finds 4, so now 16. Answer: 16\n" * 3,
]


@lru_cache(1)
def embedded() -> PreTrainedTokenizerFast:
    """The embedded target's."""
    return AutoTokenizer.from_pretrained(TARGET_PATH)


@lru_cache(8)
def byte_level(size: int = 420, *, nfc: bool = False) -> PreTrainedTokenizerFast:
    """Byte-level BPE over Qwen's words; nfc: characters are composed first."""
    tokenizer = Tokenizer(models.BPE())
    if nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(QWEN), "isolated"),
            pre_tokenizers.ByteLevel(False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        min_frequency=1,
        special_tokens=[AddedToken(END, special=True), AddedToken("<|x|>")],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=END)


@lru_cache(1)
def sentencepiece() -> PreTrainedTokenizerFast:
    """As Llama 2's: a space before a text, no words, bytes as a last resort."""
    vocab = {"<unk>": 0, END: 1}
    for b in range(256):
        vocab[f"<0x{b:02X}>"] = len(vocab)
    words = ("The", "quick", "fox", "Step", "Tom", "had", "so", "Answer", "12")
    merges = []
    for c in sorted({c for text in (*CORPUS[:2], *words) for c in text}):
        vocab.setdefault("▁" if c == " " else c, len(vocab))
    for word in words:
        word = "▁" + word
        for k in range(2, len(word) + 1):
            if word[:k] not in vocab:
                vocab[word[:k]] = len(vocab)
                merges.append((word[: k - 1], word[k - 1]))
    tokenizer = Tokenizer(
        models.BPE(vocab, merges, unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    tokenizer.add_special_tokens([AddedToken(END, special=True)])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, unk_token="<unk>"
    )


def permuted(tokenizer: PreTrainedTokenizerFast, seed: int = 0, names=()):
    """The same tokens under other ids, and the old id of each new one.

    names: (name, other name) of markers, in the chat template too.
    """
    state = json.loads(tokenizer.backend_tokenizer.to_str())
    old = list(range(len(tokenizer)))
    random.Random(seed).shuffle(old)
    new = {i: k for k, i in enumerate(old)}
    state["model"]["vocab"] = {t: new[i] for t, i in state["model"]["vocab"].items()}
    for token in state["added_tokens"]:
        token["id"] = new[token["id"]]
    state["added_tokens"].sort(key=lambda token: token["id"])

    def named(text):
        for name, other in names:
            text = text and text.replace(name, other)
        return text

    made = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(named(json.dumps(state))),
        eos_token=named(tokenizer.eos_token),
        pad_token=named(tokenizer.pad_token),
        chat_template=named(tokenizer.chat_template),
    )
    return made, old
