"""Judge suffixes under chat templates as models have them, written out in small."""

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from sglang_parse.judging.prompt import (
    build_judge_prompt,
)
from sglang_parse.options.table import DEFAULT_JUDGE_SUFFIX as QUESTION

PAIRS = (("Yes", "No"),)
SPECIAL = (
    *("<|im_start|>", "<|im_end|>", "<bos>", "<start_of_turn>", "<end_of_turn>"),
    *("<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<think>", "</think>"),
    *("<|start|>", "<|channel|>", "<|message|>", "<|end|>", "[INST]", "[/INST]"),
    *("</s>", "<｜User｜>", "<｜Assistant｜>", "<｜end▁of▁sentence｜>", "<|im_user|>"),
    *("<|im_assistant|>", "<|im_middle|>"),
)
CHATML = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
QWEN3 = CHATML.replace(
    "assistant\n' }}{% endif %}",
    "assistant\n' }}{% if enable_thinking is defined and enable_thinking is false %}"
    "{{ '<think>\n\n</think>\n\n' }}{% endif %}{% endif %}",
)
ALWAYS_THINKS = CHATML.replace(
    "assistant\n' }}{% endif", "assistant\n<think>\n' }}{% endif"
)
LLAMA3 = (
    "{% for m in messages %}{% if loop.first %}{{ '<bos>' }}{% endif %}"
    "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n'"
    " + m['content'] | trim + '<|eot_id|>' }}{% endfor %}"
    "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
)
GEMMA = (
    "{{ '<bos>' }}{% for m in messages %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}"
    "{% set role = 'model' if m['role'] == 'assistant' else m['role'] %}"
    "{{ '<start_of_turn>' + role + '\n' + m['content'] | trim"
    " + '<end_of_turn>\n' }}{% endfor %}{{ '<start_of_turn>model\n' }}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '<bos>[INST] ' + m['content'] + ' [/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + ' <|eot_id|>' }}{% endif %}{% endfor %}"
)
# gpt-oss: an answer is in the channel "final", which the model itself opens.
HARMONY = (
    "{{ '<|start|>system<|message|>Valid channels: analysis, final.<|end|>' }}"
    "{% for m in messages %}{% if m['role'] == 'assistant' %}"
    "{{ '<|start|>assistant<|channel|>final<|message|>' + m['content'] + '<|end|>' }}"
    "{% else %}"
    "{{ '<|start|>' + m['role'] + '<|message|>' + m['content'] + '<|end|>' }}"
    "{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start|>assistant' }}{% endif %}"
)
# Mistral: roles alternate, and the system prompt is folded into the last user turn.
MISTRAL = (
    "{% if messages[0]['role'] == 'system' %}{% set system = messages[0]['content'] %}"
    "{% set turns = messages[1:] %}{% else %}{% set system = 'Be brief.' %}"
    "{% set turns = messages %}{% endif %}{{ '<bos>' }}{% for m in turns %}"
    "{% if (m['role'] == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('roles must alternate') }}{% endif %}"
    "{% if m['role'] == 'user' and loop.last %}"
    "{{ '[INST] ' + system + '\n\n' + m['content'] + '[/INST]' }}"
    "{% elif m['role'] == 'user' %}{{ '[INST] ' + m['content'] + '[/INST]' }}"
    "{% else %}{{ ' ' + m['content'] + '</s>' }}{% endif %}{% endfor %}"
)
# Qwen2.5: a system prompt of its own where there is none.
OWN_SYSTEM = "{{ '<|im_start|>system\nYou are helpful.<|im_end|>\n' }}" + CHATML
# DeepSeek-V3.1 closes the thinking that it was asked to leave out; R1 always thinks.
DEEPSEEK_TURNS = (
    "{{ '<bos>' }}{% for m in messages %}{% if m['role'] == 'user' %}"
    "{{ '<｜User｜>' + m['content'] }}{% else %}{{ '<｜Assistant｜>CLOSED'"
    " + m['content'].split('</think>')[-1] + '<｜end▁of▁sentence｜>' }}"
    "{% endif %}{% endfor %}"
)
DEEPSEEK_V3 = DEEPSEEK_TURNS.replace("CLOSED", "") + "{{ '<｜Assistant｜>' }}"
DEEPSEEK_V31 = DEEPSEEK_TURNS.replace("CLOSED", "</think>") + (
    "{{ '<｜Assistant｜>' + ('<think>' if thinking else '</think>') }}"
)
DEEPSEEK_R1 = DEEPSEEK_TURNS.replace("CLOSED", "") + "{{ '<｜Assistant｜><think>\n' }}"
KIMI = (
    "{% for m in messages %}{{ '<|im_' + m['role'] + '|>' + m['role']"
    " + '<|im_middle|>' + m['content'] + '<|im_end|>' }}{% endfor %}"
    "{{ '<|im_assistant|>assistant<|im_middle|>' }}"
)
PARTS_ONLY = CHATML.replace("m['content']", "m['content'][0]['text']")
REFUSES = "{{ raise_exception('one turn only') }}"

EXPECTED = {
    "chatml": (
        CHATML,
        f"<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "qwen3": (
        QWEN3,
        f"<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n",
    ),
    "always_thinks": (
        ALWAYS_THINKS,
        f"<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
        "<think>\n\n</think>\n\n",
    ),
    "llama3": (
        LLAMA3,
        f"<|eot_id|><|start_header_id|>user<|end_header_id|>\n\n{QUESTION}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n",
    ),
    "gemma": (
        GEMMA,
        f"<end_of_turn>\n<start_of_turn>user\n{QUESTION}<end_of_turn>\n"
        "<start_of_turn>model\n",
    ),
    "llama2": (LLAMA2, f" <|eot_id|><bos>[INST] {QUESTION} [/INST]"),
    "parts_only": (
        PARTS_ONLY,
        f"<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "harmony": (
        HARMONY,
        f"<|end|><|start|>user<|message|>{QUESTION}<|end|><|start|>assistant"
        "<|channel|>final<|message|>",
    ),
    "mistral": (MISTRAL, f"</s>[INST] Be brief.\n\n{QUESTION}[/INST]"),
    "own_system": (
        OWN_SYSTEM,
        f"<|im_end|>\n<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n",
    ),
    "deepseek_v3": (
        DEEPSEEK_V3,
        f"<｜end▁of▁sentence｜><｜User｜>{QUESTION}<｜Assistant｜>",
    ),
    "deepseek_v31": (
        DEEPSEEK_V31,
        f"<｜end▁of▁sentence｜><｜User｜>{QUESTION}<｜Assistant｜></think>",
    ),
    "deepseek_r1": (
        DEEPSEEK_R1,
        f"<｜end▁of▁sentence｜><｜User｜>{QUESTION}<｜Assistant｜><think>\n\n</think>\n\n",
    ),
    "kimi": (
        KIMI,
        f"<|im_end|><|im_user|>user<|im_middle|>{QUESTION}<|im_end|>"
        "<|im_assistant|>assistant<|im_middle|>",
    ),
    "none": (None, f"\n\nQuestion: {QUESTION}\nAnswer:"),
}


def build_tokenizer(chat_template=CHATML, words="Yes No", extra=()):
    """Byte-level BPE in which " Yes", "Yes", and so on are single tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        min_frequency=2,
        special_tokens=[AddedToken(t, special=True) for t in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    corpus = [text for w in words.split() for text in (w, " " + w, "\n" + w)]
    tokenizer.train_from_iterator(corpus * 2, trainer)
    tokenizer.add_tokens(list(extra))
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=chat_template
    )


def build_sentencepiece_like(chat_template):
    """A Metaspace tokenizer, which puts a space before the first word of a text."""
    chars = sorted(set("▁\n" + QUESTION + "PARSE-CUT-MARK[INST/]user model"))
    merges = [("Y", "e"), ("Ye", "s"), ("▁", "Yes"), ("N", "o"), ("▁", "No")]
    words = [*chars, *(a + b for a, b in merges)]
    vocab = {piece: i for i, piece in enumerate(dict.fromkeys(words))}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.add_special_tokens([AddedToken(t, special=True) for t in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<|im_end|>", chat_template=chat_template
    )


@pytest.mark.parametrize("name", EXPECTED)
def test_suffix_follows_chat_template(name):
    template, expected = EXPECTED[name]
    tokenizer = build_tokenizer(template)
    prompt = build_judge_prompt(tokenizer, QUESTION, PAIRS)
    assert tokenizer.decode(prompt.suffix) == expected
    assert list(prompt.suffix) == tokenizer.encode(expected, add_special_tokens=False)


@pytest.mark.parametrize("name", EXPECTED)
def test_verdict_words_are_tokens_that_open_the_answer(name):
    tokenizer = build_tokenizer(EXPECTED[name][0])
    # Llama-2's and Mistral's answers and the plain-text fallback's begin with a space.
    lead = "Ġ" if name in ("llama2", "mistral", "none") else ""
    (pair,) = build_judge_prompt(tokenizer, QUESTION, PAIRS).verdict_ids
    assert tokenizer.convert_ids_to_tokens(pair) == [lead + "Yes", lead + "No"]


@pytest.mark.parametrize(("name", "lead"), [("gemma", ""), ("llama2", "▁")])
def test_sentencepiece_prefix_space_stays_out(name, lead):
    tokenizer = build_sentencepiece_like(EXPECTED[name][0])
    prompt = build_judge_prompt(tokenizer, QUESTION, PAIRS)
    words = tokenizer.convert_ids_to_tokens(prompt.verdict_ids[0])
    assert words == [lead + "Yes", lead + "No"]
    head = ["▁", "<|eot_id|>"] if name == "llama2" else ["<end_of_turn>", "\n"]
    assert tokenizer.convert_ids_to_tokens(prompt.suffix[:2]) == head


def test_several_pairs_keep_their_order():
    tokenizer = build_tokenizer(words="Yes No yes no")
    prompt = build_judge_prompt(tokenizer, QUESTION, (("Yes", "No"), ("no", "yes")))
    words = [tokenizer.convert_ids_to_tokens(pair) for pair in prompt.verdict_ids]
    assert words == [["Yes", "No"], ["no", "yes"]]


def test_fallback_takes_word_without_space_if_need_be():
    tokenizer = build_tokenizer(None, words="No", extra=["@"])
    (pair,) = build_judge_prompt(tokenizer, QUESTION, (("@", "No"),)).verdict_ids
    assert tokenizer.convert_ids_to_tokens(pair) == ["@", "ĠNo"]


@pytest.mark.parametrize("template", [CHATML, None])
def test_verdict_word_of_several_tokens_is_refused(template):
    tokenizer = build_tokenizer(template)
    with pytest.raises(ValueError) as error:
        build_judge_prompt(tokenizer, QUESTION, (("Zut", "No"),))
    count = 3 if template else 4
    assert f"'Zut' takes {count} tokens" in str(error.value)
    assert "--speculative-parse-verdict-tokens" in str(error.value)


def test_equal_verdict_ids_are_refused():
    with pytest.raises(ValueError, match="are the same token"):
        build_judge_prompt(build_tokenizer(), QUESTION, (("Yes", "Yes"),))


def test_unknown_verdict_word_is_refused():
    vocab = {"<unk>": 0, "a": 1, "No": 2}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>")
    with pytest.raises(ValueError, match="'Yes' takes 1 tokens.*one known token"):
        build_judge_prompt(wrapped, QUESTION, PAIRS)


@pytest.mark.parametrize(
    ("template", "reason"),
    [(REFUSES, "one turn only"), ("{{ messages[0]['content'] }}", "leaves out")],
)
def test_template_that_cannot_ask_is_refused(template, reason):
    with pytest.raises(ValueError, match=reason):
        build_judge_prompt(build_tokenizer(template), QUESTION, PAIRS)


def test_tokenizer_that_takes_no_template_options_is_served():
    class Strict(PreTrainedTokenizerFast):
        def apply_chat_template(self, messages, *, tokenize, add_generation_prompt):
            return super().apply_chat_template(
                messages, tokenize=tokenize, add_generation_prompt=add_generation_prompt
            )

    plain = build_tokenizer()
    strict = Strict(tokenizer_object=plain.backend_tokenizer, chat_template=CHATML)
    ours, expected = (build_judge_prompt(t, QUESTION, PAIRS) for t in (strict, plain))
    assert ours == expected
