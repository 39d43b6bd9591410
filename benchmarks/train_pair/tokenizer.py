"""The pair's tokenizer: byte-level BPE; every task word and 0..99 is one token."""

from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, trainers
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from transformers import PreTrainedTokenizerFast

from benchmarks.embedded_answers import render_answer
from sglang_parse.embedded.task import make_problems

IM_START, IM_END, PAD = "<|im_start|>", "<|im_end|>", "<|endoftext|>"
QUESTION = "Is everything so far correct? Answer Yes or No."
SHORT_QUESTION = "Is everything correct?"
GENERAL = (
    "system\nuser\nassistant\nYes\nNo\nTrue\nFalse\n"
    "You are a careful and helpful assistant. Work step by step.\n"
    "The quick brown fox jumps over the lazy dog. Please check this answer, and say"
    " whether it is right or wrong."
)
# Of the draft in another tokenizer: rarer words of the task are two tokens or more.
OTHER_VOCAB = 384
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{{ '<|im_end|>' + '\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


# Words as Qwen's and Llama 3's tokenizers cut them: a line break belongs to the
# punctuation before it, and each digit is a word.
OTHER_WORDS = (
    r"[^\r\n\p{L}\p{N}]?\p{L}+| ?\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def build_tokenizer(*, other: bool = False) -> PreTrainedTokenizerFast:
    """Train the tokenizer; no seed but that of the fixed corpus.

    other: one with other words, merges and ids; its markers have the same names.
    """
    tokenizer = Tokenizer(models.BPE())
    words = (
        [Split(Regex(OTHER_WORDS), "isolated"), ByteLevel(False, use_regex=False)]
        if other
        else [Split(Regex("\n"), "isolated"), ByteLevel(add_prefix_space=False)]
    )
    tokenizer.pre_tokenizer = Sequence(words)
    tokenizer.decoder = decoders.ByteLevel()
    names = (IM_END, PAD, IM_START) if other else (PAD, IM_START, IM_END)
    trainer = trainers.BpeTrainer(
        vocab_size=OTHER_VOCAB if other else 1000,
        min_frequency=1,
        special_tokens=[AddedToken(t, special=True) for t in names],
        initial_alphabet=sorted(ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token=IM_END,
        pad_token=PAD,
        chat_template=CHAT_TEMPLATE,
        model_max_length=2048,
        clean_up_tokenization_spaces=False,
    )


def _corpus() -> list[str]:
    texts = [GENERAL, QUESTION, " ".join(["", *map(str, range(100))])]
    for problem in make_problems(300, 0, "train"):
        answers = (render_answer(problem, style) for style in "AB")
        texts += [problem.prompt, *answers]
    return texts


def judge_suffix(
    tokenizer: PreTrainedTokenizerFast, question: str = QUESTION
) -> list[int]:
    """Tokens from the end of a cut answer to the open assistant turn of the judge."""
    messages = [
        {"role": "user", "content": "U"},
        {"role": "assistant", "content": "CUT"},
        {"role": "user", "content": question},
    ]
    text = tokenizer.apply_chat_template(
        messages, tokenize=False, add_generation_prompt=True
    )
    return tokenizer.encode(text.split("CUT", 1)[1], add_special_tokens=False)


class Encoder:
    """Cached text -> ids; texts must be cut where the pre-tokenizer cuts."""

    def __init__(self, tokenizer: PreTrainedTokenizerFast) -> None:
        self.tokenizer = tokenizer
        self.ids = lru_cache(maxsize=200_000)(self._ids)

    def _ids(self, text: str) -> list[int]:
        return self.tokenizer.encode(text, add_special_tokens=False)

    def prompt(self, text: str) -> list[int]:
        """Ids of the rendered user turn up to the open assistant turn."""
        pieces = text.replace(". ", ".\0 ").split("\0")
        body = [i for piece in pieces for i in self.ids(piece)]
        head = self.ids(f"{IM_START}user\n")
        return head + body + self.ids(f"{IM_END}\n{IM_START}assistant\n")


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerFast:
    return PreTrainedTokenizerFast.from_pretrained(path)
