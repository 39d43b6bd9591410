"""What the target answers to generated questions: the head's training texts."""

from __future__ import annotations

import json
import random
import time
from pathlib import Path
from typing import Any

import torch

from sglang_parse.models import prompts

Text = tuple[list[int], list[int]]  # context, what the target wrote after it
NOUNS = (
    *("tea", "a bridge", "the human heart", "a wallet", "a train", "glass", "honey"),
    *("a recipe", "a garden", "gravity", "the desert", "a camera", "an essay", "wool"),
    *("a museum", "photosynthesis", "an umbrella", "a storm", "the sea", "a castle"),
    *("electricity", "friendship", "a football match", "time zones", "a budget"),
    *("swimming", "a telescope", "the alphabet", "a market", "sleep", "paper", "music"),
)
ASKS = (
    "What is {}?",
    "Describe {} in two sentences.",
    "Give three tips about {}.",
    "Write a poem about {}.",
    "How does {} work?",
    "Write a letter to a friend about {}.",
    "List the advantages and disadvantages of {}.",
    "Compare {} with {}.",
    "Write a Python class that models {}.",
    "Tell me a joke about {}.",
    "Summarize the history of {}.",
    "Plan a lesson about {}.",
)
OWN = 0.5  # share of questions made here; the others are of the eight kinds
BATCH = 64


def questions(count: int, seed: int) -> list[prompts.Conversation]:
    """Short conversations; those of tests/real and of the demo may be among them only
    by chance of the same topic, since numbers above theirs choose other words."""
    rng = random.Random(seed)
    things = (*NOUNS, *prompts.TOPICS)
    kinds = [k for k in prompts.KINDS if k != "long"]
    found: list[prompts.Conversation] = []
    for _ in range(count):
        if rng.random() < OWN:
            ask = rng.choice(ASKS)
            filled = ask.format(*rng.sample(things, 2))
            found.append(prompts.user(filled))
        else:
            kind = prompts.KINDS[rng.choice(kinds)]
            found.append(kind(rng.randrange(13, 2000)))
    return found


@torch.no_grad()
def answer(
    model: Any, tokenizer: Any, asked: list[prompts.Conversation], longest: int
) -> list[Text]:
    """The greedy answers to a batch; what ends an answer is part of it."""
    contexts = [
        tokenizer.encode(
            tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            ),
            add_special_tokens=False,
        )
        for messages in asked
    ]
    width = max(map(len, contexts))
    pad = tokenizer.pad_token_id
    rows = [[pad] * (width - len(c)) + c for c in contexts]
    mask = [[0] * (width - len(c)) + [1] * len(c) for c in contexts]
    out = model.generate(
        torch.tensor(rows),
        attention_mask=torch.tensor(mask),
        max_new_tokens=longest,
        do_sample=False,
    )
    return [
        (context, up_to_end(row, tokenizer.eos_token_id))
        for context, row in zip(contexts, out[:, width:].tolist(), strict=True)
    ]


def up_to_end(row: list[int], eos: int) -> list[int]:
    return row[: row.index(eos) + 1] if eos in row else row


def write_texts(
    model: Any,
    tokenizer: Any,
    path: Path,
    *,
    count: int,
    longest: int,
    seed: int,
    until: float,
) -> list[Text]:
    """Texts of `path`, one JSON line each, with new ones until `count` or a time.

    until: of time.monotonic(). Each batch is written as soon as it is there.
    """
    texts = read_texts(path)
    asked = questions(count, seed)
    while len(texts) < count and time.monotonic() < until:
        batch = asked[len(texts) : len(texts) + BATCH]
        new = answer(model, tokenizer, batch, longest)
        with path.open("a", encoding="utf-8") as f:
            f.writelines(json.dumps(text) + "\n" for text in new)
        texts += new
    return texts


def read_texts(path: Path) -> list[Text]:
    """[] where there is no file; a line cut off by an interruption is left out."""
    if not path.is_file():
        return []
    found: list[Text] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        if line.endswith("]]"):
            context, own = json.loads(line)
            found.append((context, own))
    return found
