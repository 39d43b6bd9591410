"""The judge's question: suffix tokens that make the target rate a prefix of its answer.

The suffix closes the assistant turn, asks the question as a user turn and opens the
next answer, as the model's own chat template writes these. The verdict is read from the
logits of the first answer token, so every verdict word must be one token there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

from sglang_parse.options.validation import CUT_MARK

FALLBACK_SUFFIX = "\n\nQuestion: {question}\nAnswer:"
# What the user says in the exchange that templates render.
FIRST_TURN = "PARSE-FIRST-TURN"
# Make templates open the answer rather than a thinking block.
NO_THINKING = {"enable_thinking": False, "thinking": False}


@dataclass(frozen=True)
class JudgePrompt:
    """What the prefixes of a request are judged with.

    suffix: token ids after a prefix. verdict_ids: (yes, no) ids of each pair; a judge
    of an installed package needs none.
    """

    suffix: tuple[int, ...]
    verdict_ids: tuple[tuple[int, int], ...] = ()


def build_judge_prompt(
    tokenizer: Any, question: str, verdict_pairs: Sequence[tuple[str, str]]
) -> JudgePrompt:
    """Suffix and verdict tokens for `question` under a Hugging Face tokenizer.

    Raises ValueError if the chat template cannot render the exchange, or if a verdict
    word is not exactly one token at the start of the answer.
    """
    text, lead = _suffix_text(tokenizer, question)

    def verdict_id(word: str) -> int:
        return _verdict_id(tokenizer, CUT_MARK + text, word, lead)

    pairs = []
    for yes, no in verdict_pairs:
        pair = verdict_id(yes), verdict_id(no)
        if pair[0] == pair[1]:
            raise ValueError(
                f"Verdict words {yes!r} and {no!r} are the same token {pair[0]}; give "
                "words that differ with --speculative-parse-verdict-tokens."
            )
        pairs.append(pair)
    suffix = tuple(_encode_after(tokenizer, CUT_MARK, text))
    return JudgePrompt(suffix, tuple(pairs))


def _suffix_text(tokenizer: Any, question: str) -> tuple[str, str]:
    """Text of the suffix, and the space, if any, with which an answer begins."""
    if not getattr(tokenizer, "chat_template", None):
        return FALLBACK_SUFFIX.format(question=question), " "
    before, _, text = _render(tokenizer, question).rpartition(CUT_MARK)
    if text.rstrip().endswith("<think>"):
        # The template thinks regardless.
        return text.rstrip() + "\n\n</think>\n\n", ""
    # What the model itself writes in front of an answer: gpt-oss opens the channel
    # "final"; Llama-2 writes a space behind the "[/INST]" that its prompts end in.
    prompted = text.rpartition(question.strip())[2]
    answered = before.rpartition(FIRST_TURN)[2]
    is_longer = answered.startswith(prompted)
    opening = answered[len(prompted) :] if is_longer else ""
    if opening.strip():
        return text + opening, ""
    return text, " " if opening.endswith(" ") else ""


def _render(tokenizer: Any, question: str) -> str:
    """The exchange in the model's chat format, with CUT_MARK as the first answer."""
    turns = (("user", FIRST_TURN), ("assistant", CUT_MARK), ("user", question))
    error: Exception | None = None
    # Some templates want content as a list of parts, some tokenizers no extra options.
    for in_parts, options in product((False, True), (NO_THINKING, {})):
        messages = [
            {"role": role, "content": [{"type": "text", "text": s}] if in_parts else s}
            for role, s in turns
        ]
        try:
            text: str = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True, **options
            )
        except Exception as e:  # a template may raise anything
            error = error or e
            continue
        if question.strip() in text.rpartition(CUT_MARK)[2] and CUT_MARK in text:
            return text
    reason = f": {error}" if error else ", which leaves out the answer or the question"
    raise ValueError(
        "The target's chat template cannot ask the judge's question after an answer"
        f"{reason} (its tokenizer's own; see --speculative-parse-judge-suffix)."
    )


def _verdict_id(tokenizer: Any, before: str, word: str, lead: str) -> int:
    """Id of a verdict word at the start of the answer that follows `before`."""
    forms = dict.fromkeys([lead + word, word])
    tokens = {form: _encode_after(tokenizer, before, form) for form in forms}
    for ids in tokens.values():
        if len(ids) == 1 and ids[0] != tokenizer.unk_token_id:
            return ids[0]
    ids = tokens[lead + word]
    raise ValueError(
        f"Verdict word {word!r} takes {len(ids)} tokens at the start of the answer, "
        "expected one known token; choose other words with "
        "--speculative-parse-verdict-tokens."
    )


def _encode_after(tokenizer: Any, before: str, text: str) -> list[int]:
    """Ids of `text` where it follows `before`, without a space that starts a text.

    Where the two share a token, the ids of `text` alone.
    """
    front = tokenizer.encode(before, add_special_tokens=False)
    ids = tokenizer.encode(before + text, add_special_tokens=False)
    if ids[: len(front)] == front:
        return list(ids[len(front) :])
    return list(tokenizer.encode(text, add_special_tokens=False))
