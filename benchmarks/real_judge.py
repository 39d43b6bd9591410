"""Can a model be the judge of its drafts, without having been trained to?

    python -m benchmarks.real_judge --url URL --out FILE

Asks a running PARSE server about steps whose verdict is known, by several wordings of
the question and several pairs of verdict words. Each wording is asked once through
`parse_verify`, with the server's own words. All pairs of words are read from one plain
request for each prefix; for the server's words both ways must agree.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import requests

from benchmarks.judge_steps import (
    Steps,
    accept_rates,
    auc,
    auc_interval,
    make_steps,
)
from benchmarks.provenance import provenance
from sglang_parse.calibrate.served import server_info
from sglang_parse.cli.demo_run import load_tokenizer
from sglang_parse.judging.prompt import build_judge_prompt

WORDINGS = (
    "Is everything so far correct? Answer Yes or No.",
    "Is everything correct?",
    "Is the last statement true? Answer True or False.",
    "Is your answer right or wrong?",
    "Is there a mistake in this answer? Answer Yes or No.",
    "Check this. Is it correct or incorrect?",
)
# A wording that asks for a mistake is answered the other way round.
MISTAKE = WORDINGS[4]
PAIRS = (("Yes", "No"), ("True", "False"), ("right", "wrong"), ("Good", "Bad"))
THRESHOLDS = (0.3, 0.5, 0.7, 0.9, 0.97)
TIMEOUT_S = 300


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--items", type=int, default=24, help="of each kind")
    parser.add_argument(
        "--wordings", type=int, default=len(WORDINGS), help="the first so many"
    )
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--seed", type=int, default=5)
    args = parser.parse_args()
    info = server_info(args.url)
    tokenizer = load_tokenizer(info["tokenizer_path"])
    steps = make_steps(args.items, args.seed)
    rows = []
    for wording in WORDINGS[: args.wordings]:
        rows += ask_wording(args.url, tokenizer, steps, wording, args.concurrency)
        print(
            wording, *(f"{r['words']} {r['kind']} {r['auc']:.2f}" for r in rows[-12:])
        )
    data = {
        "model": Path(info["model_path"]).name,
        "items_of_each_kind": args.items,
        "seed": args.seed,
        "rows": rows,
        "provenance": provenance(),
    }
    args.out.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def ask_wording(
    url: str, tokenizer: Any, steps: Sequence[Steps], wording: str, concurrency: int
) -> list[dict[str, Any]]:
    """Figures of one wording: a row for each pair of words and kind of step."""
    pairs = [(b, a) for a, b in PAIRS] if wording == MISTAKE else list(PAIRS)
    judge = build_judge_prompt(tokenizer, wording, pairs)
    with ThreadPoolExecutor(concurrency) as threads:
        in_one_pass = list(
            threads.map(lambda s: verify(url, tokenizer, s, wording), steps)
        )
        by_words = list(
            threads.map(lambda s: read_words(url, tokenizer, s, judge), steps)
        )
    if wording == MISTAKE:  # the server knows no such pair
        in_one_pass = [[1 - x for x in scores] for scores in in_one_pass]
    rows = []
    for k, words in enumerate(pairs):
        found = [[scores[k] for scores in item] for item in by_words]
        gap = max_gap(found, in_one_pass) if k == 0 else None
        for kind in dict.fromkeys(s.kind for s in steps):
            rows.append(figures(kind, wording, words, steps, found) | {"gap": gap})
    return rows


def verify(url: str, tokenizer: Any, steps: Steps, wording: str) -> list[float]:
    """Scores of all prefixes in one pass, by the server's own verdict words."""
    custom = {"parse_verify": list(steps.steps), "parse_judge_suffix": wording}
    reply = post(
        url,
        {
            "input_ids": prompt_ids(tokenizer, steps.question),
            "sampling_params": {"max_new_tokens": 1, "custom_params": custom},
        },
    )
    return [s["score"] for s in reply["meta_info"]["parse"][0]["segments"]]


def read_words(url: str, tokenizer: Any, steps: Steps, judge: Any) -> list[list[float]]:
    """[prefix][pair] scores, from the log-probabilities of one token behind each."""
    scores = []
    for k in range(len(steps.steps)):
        text = "".join(steps.steps[: k + 1])
        ids = prompt_ids(tokenizer, steps.question)
        ids += tokenizer.encode(text, add_special_tokens=False)
        words = sorted({i for pair in judge.verdict_ids for i in pair})
        reply = post(
            url,
            {
                "input_ids": [*ids, *judge.suffix],
                "sampling_params": {"max_new_tokens": 1, "temperature": 0},
                "return_logprob": True,
                "token_ids_logprob": words,
            },
        )
        given = reply["meta_info"]["output_token_ids_logprobs"][0]
        logprobs = {token: value for value, token, _ in given}
        scores.append(
            [
                1 / (1 + math.exp(logprobs[no] - logprobs[yes]))
                for yes, no in judge.verdict_ids
            ]
        )
    return scores


def prompt_ids(tokenizer: Any, question: str) -> list[int]:
    text = tokenizer.apply_chat_template(
        [{"role": "user", "content": question}],
        tokenize=False,
        add_generation_prompt=True,
    )
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def post(url: str, body: dict[str, Any]) -> dict[str, Any]:
    reply = requests.post(url + "/generate", json=body, timeout=TIMEOUT_S)
    reply.raise_for_status()
    data: dict[str, Any] = reply.json()
    return data


def max_gap(found: list[list[float]], other: list[list[float]]) -> float:
    """The largest difference between two ways of scoring the same prefixes."""
    return max(
        abs(a - b)
        for one, two in zip(found, other, strict=True)
        for a, b in zip(one, two, strict=True)
    )


def figures(
    kind: str,
    wording: str,
    words: tuple[str, str],
    steps: Sequence[Steps],
    found: list[list[float]],
) -> dict[str, Any]:
    """AUC and rates over right prefixes and first wrong ones of a kind."""
    groups: dict[bool, list[float]] = {True: [], False: []}
    for item, scores in zip(steps, found, strict=True):
        if item.kind != kind:
            continue
        for k, (gold, score) in enumerate(zip(item.gold, scores, strict=True)):
            if gold or k == 0 or item.gold[k - 1]:
                groups[gold].append(score)
    right, wrong = groups[True], groups[False]
    return {
        "kind": kind,
        "wording": wording,
        "words": "/".join(words),
        "right": len(right),
        "wrong": len(wrong),
        "auc": round(auc(right, wrong), 4),
        "auc_95": [round(x, 4) for x in auc_interval(right, wrong)],
        "rates": accept_rates(right, wrong, THRESHOLDS),
    }


if __name__ == "__main__":
    main()
