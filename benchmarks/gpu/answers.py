"""What whole servers answer: exact mode and no drafts beside the target, a temperature,
a grammar.

With random weights two tokens may be nearly as likely as each other, and bfloat16 then
decides by the shape of a batch. So the target answers twice, one request at a time and
all at once, and the share of an answer on which it agrees with itself is the floor for
PARSE's answers: 0.9 of it, or the cell is an error.
"""

from __future__ import annotations

import json
import random
import re
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

MAX_PROMPT_ID = 250  # below every tokenizer's vocabulary here
NUM_PROMPTS, OUTPUT = 8, 48
RULE = "[0-9]{2,12}"
SAMPLED = {"temperature": 0.7, "top_p": 0.9}
FLOOR = 0.9


def generate(
    url: str, prompt: Sequence[int], num_tokens: int, **params: Any
) -> dict[str, Any]:
    """One answer of a server, of `num_tokens` tokens, greedy unless `params` differ."""
    greedy = {"temperature": 0, "max_new_tokens": num_tokens, "ignore_eos": True}
    body = {"input_ids": list(prompt), "sampling_params": greedy | params}
    request = urllib.request.Request(
        url + "/generate",
        data=json.dumps(body).encode(),
        headers={"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=300) as reply:
        return json.load(reply)


def random_prompts(seed: int, num: int, length: int) -> list[list[int]]:
    rng = random.Random(seed)
    return [
        [rng.randrange(5, MAX_PROMPT_ID) for _ in range(length)] for _ in range(num)
    ]


def agreement(
    answers: Sequence[Sequence[int]], others: Sequence[Sequence[int]]
) -> float:
    """Share of the tokens of `answers` before the first that differs in `others`."""
    same = 0
    for answer, other in zip(answers, others, strict=True):
        pairs = enumerate(zip(answer, other, strict=False))
        same += next((i for i, (a, b) in pairs if a != b), min(len(answer), len(other)))
    return same / sum(map(len, answers))


class Answers:
    """Of the server at `url`, to the same prompts of `context` tokens each."""

    def __init__(self, url: str, context: int) -> None:
        self._url = url
        self._prompts = random_prompts(2026, NUM_PROMPTS, context)

    def _ask(self, at_once: int, **params: Any) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(at_once) as threads:
            return list(
                threads.map(
                    lambda p: generate(self._url, p, OUTPUT, **params), self._prompts
                )
            )

    def _ids(self, at_once: int = NUM_PROMPTS, **params: Any) -> list[list[int]]:
        return [r["output_ids"] for r in self._ask(at_once, **params)]

    def of_target(self) -> dict[str, Any]:
        """The answers to compare with, and how far the target agrees with itself."""
        rule = {"regex": RULE, "ignore_eos": False}
        greedy, ruled = self._ids(), self._ids(**rule)
        return {
            "greedy": greedy,
            "ruled": ruled,
            "floor": {
                "greedy": agreement(greedy, self._ids(at_once=1)),
                "ruled": agreement(ruled, self._ids(at_once=1, **rule)),
            },
        }

    def of_parse(self, target: dict[str, Any]) -> dict[str, Any]:
        """How far exact mode and no drafts agree with what `of_target` gave.

        With `error` if that is too little, if a sampled answer has a wrong length, or
        if one under the grammar has a wrong text.
        """
        found: dict[str, Any] = {"floor": target["floor"]}
        wrong = []
        for kind, params in (
            ("greedy", {}),
            ("ruled", {"regex": RULE, "ignore_eos": False}),
        ):
            for mode in ("exact", "off"):
                ids = self._ids(**params, custom_params={"parse_mode": mode})
                share = agreement(target[kind], ids)
                found[f"{kind} {mode}"] = share
                if share < FLOOR * target["floor"][kind]:
                    wrong.append(f"{kind} answers of {mode} agree to {share:.2f}")
        for mode in ("semantic", "exact"):
            custom = {"parse_mode": mode}
            sampled = self._ask(NUM_PROMPTS, **SAMPLED, custom_params=custom)
            if any(len(r["output_ids"]) != OUTPUT for r in sampled):
                wrong.append(f"a sampled answer of {mode} has another length")
            rule = SAMPLED | {"regex": RULE, "ignore_eos": False}
            ruled = self._ask(NUM_PROMPTS, **rule, custom_params=custom)
            if not all(re.fullmatch(RULE, r["text"].strip()) for r in ruled):
                wrong.append(f"a sampled answer of {mode} breaks the grammar")
        return found | ({"error": "; ".join(wrong)} if wrong else {})
