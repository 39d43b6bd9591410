"""`sglang-parse report`: is a running server faster, and are its answers as good?

Problems are asked in turns of the target alone, exact mode and the server as it is.
Then the judge reads right answers in which a line was made wrong, and the target says
how probable it finds each answer.
"""

from __future__ import annotations

import argparse
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import pairwise
from statistics import mean
from typing import Any

from tqdm import tqdm

from sglang_parse import __version__
from sglang_parse.calibrate.calibration import WARM_UP, encode, grade
from sglang_parse.calibrate.problems import load_items
from sglang_parse.calibrate.served import parse_settings, server_info
from sglang_parse.calibrate.trials import EXACT, compare
from sglang_parse.cli.demo_run import table_column
from sglang_parse.cli.pair_page import ALONE, SERVED, report_page
from sglang_parse.cli.trace import COUNTS, post
from sglang_parse.demo.figures import RequestResult, summarise
from sglang_parse.demo.load import Prompt, load_tokenizer, measure

TURNS, CONFIDENCE = 4, 0.95
OFF = {"parse_mode": "off"}
ARMS: dict[str, dict[str, Any]] = {
    ALONE: OFF,
    "exact": {"parse_mode": "exact"},
    SERVED: {"parse_report": True},
}
MARKUP = re.compile(r"(?m)^(?:```|#+ |[-*] |\d+\. |\|)")
# Not at a line's start, where it is the number of a list.
LAST_NUMBER = re.compile(r"(?<=\s)\d+(?=\D*$)")
Answers = Sequence[RequestResult]


def run_report(options: argparse.Namespace) -> str:
    """Measure the server; returns the page. Raises ValueError before any request is
    sent, LoadError or RuntimeError when one fails."""
    url, alone_url = options.url, options.target_url or options.url
    items = load_items(options.prompts, problems=options.problems, seed=options.seed)
    info, served_alone = server_info(url), server_info(alone_url)["model_path"]
    settings = parse_settings(info, url)
    if served_alone != info["model_path"]:
        raise ValueError(
            f"--target-url {alone_url} serves {served_alone!r}, expected the target "
            f"of --url, {info['model_path']!r}."
        )
    prompts = encode(load_tokenizer(info["tokenizer_path"]), info, options, items)
    ids = [prompt.input_ids for prompt in prompts]
    found, walls = in_turns(options, prompts)
    alone = found[ALONE]
    has_gold = all(item.reference is not None for item in items)
    grades = {arm: grade(items, alone, found[arm], has_gold=has_gold) for arm in ARMS}
    right = {arm: graded.right for arm, graded in grades.items()}
    planted = plant(alone, right[ALONE], random.Random(options.seed))
    arms = {}
    with ThreadPoolExecutor(options.concurrency) as threads:
        scores = threads.map(lambda p: verify(url, ids[p["item"]], p["lines"]), planted)
        planted = [p | {"scores": s} for p, s in zip(planted, scores, strict=True)]
        for arm, answers in found.items():
            change = compare(EXACT, grades[arm], grades[ALONE], CONFIDENCE)
            back = compare(EXACT, grades[ALONE], grades[arm], CONFIDENCE)
            rows = threads.map(lambda p, a: logprobs(url, p, a), ids, answers)
            marked = map(lambda a, r: replace(a, correct=r), answers, right[arm])
            figures = summarise(arm, options.concurrency, [*marked], sum(walls[arm]))
            ratio = sum(walls[ALONE]) / sum(walls[arm])
            turns = zip(walls[ALONE], walls[arm], strict=True)
            arms[arm] = {
                **table_column(replace(figures, ratio=ratio)),
                "ratio in each turn": ", ".join(f"{a / b:.2f}x" for a, b in turns),
                "answers that became wrong": change.lost,
                "answers that became right": change.gained,
                "change of accuracy, points": (-change.bound, back.bound),
                **drift(answers, alone),
                "mean log-probability": round(mean(v for r in rows for v in r), 4),
            }
    return report_page(
        {
            "target": info["model_path"],
            "draft": info.get("speculative_draft_model_path") or "none",
            "versions": f"SGLang {info.get('version')}, sglang-parse {__version__}",
            "target alone": options.target_url or "the same server, parse_mode off",
            "questions": options.prompts or "the embedded task",
            "problems": len(items),
            "requests at a time": options.concurrency,
            "right by": "its reference" if has_gold else "the target's final answer",
            "margin": options.margin,
            "settings": settings,
            "arms": arms,
            "counts": {
                name: sum((a.report or {}).get(key, 0) for a in found[SERVED])
                for key, name in COUNTS
            },
            "planted": planted,
            "worse": [
                {"question": items[k].prompt, ALONE: alone[k].text, SERVED: a.text}
                for k, a in enumerate(found[SERVED])
                if right[ALONE][k] and not right[SERVED][k]
            ],
        }
    )


def in_turns(
    options: argparse.Namespace, prompts: Sequence[Prompt]
) -> tuple[dict[str, list[RequestResult]], dict[str, list[float]]]:
    """Answers of each arm, and its seconds in each turn. Their order rotates."""
    found: dict[str, list[RequestResult]] = {arm: [] for arm in ARMS}
    walls: dict[str, list[float]] = {arm: [] for arm in ARMS}
    ends = [turn * len(prompts) // TURNS for turn in range(TURNS + 1)]
    names = list(ARMS)
    with tqdm(total=len(ARMS) * len(prompts), unit="req") as bar:
        for turn, (start, end) in enumerate(pairwise(ends)):
            for arm in names:
                is_other = arm == ALONE and options.target_url
                done = measure(
                    options.target_url if is_other else options.url,
                    prompts[start:end],
                    concurrency=options.concurrency,
                    warm_up=() if turn else prompts[:WARM_UP],
                    custom_params=None if is_other else ARMS[arm],
                    on_answer=bar.update,
                )
                found[arm] += done.results
                walls[arm].append(done.wall_s)
            names.append(names.pop(0))
    return found, walls


def plant(
    answers: Answers, right: Sequence[bool], rng: random.Random
) -> list[dict[str, Any]]:
    """Right answers, each cut behind a line that was made wrong: its last number is one
    higher, or a line of the next question's answer takes its place."""
    split = [a.text.splitlines(keepends=True) for a in answers]
    found = []
    for item, lines in enumerate(split):
        if not right[item] or len(lines) < 2:
            continue
        depth = rng.randrange(len(lines))
        was = lines[depth]
        higher = LAST_NUMBER.sub(lambda m: str(int(m[0]) + 1), was)
        other = rng.choice(split[(item + 1) % len(split)] or [""])
        for kind, wrong in (("a number", higher), ("a foreign line", other)):
            if wrong.strip() and wrong.strip() not in map(str.strip, lines):
                place = 3 * depth // len(lines)
                row = {"item": item, "kind": kind, "third": place, "was": was}
                found.append(row | {"lines": [*lines[:depth], wrong]})
    return found


def verify(url: str, prompt: Sequence[int], lines: Sequence[str]) -> list[float]:
    """The verdict on each prefix of `lines`."""
    sampling = {"max_new_tokens": 1, "custom_params": {"parse_verify": list(lines)}}
    body = {"input_ids": list(prompt), "sampling_params": sampling}
    report = post(url + "/generate", body)["meta_info"]["parse"][0]
    return [segment["score"] for segment in report["segments"]]


def logprobs(url: str, prompt: Sequence[int], answer: RequestResult) -> list[float]:
    """The target's log-probability of each token of an answer."""
    body = {
        "input_ids": [*prompt, *answer.token_ids],
        "sampling_params": {"max_new_tokens": 1, "custom_params": OFF},
        **{"return_logprob": True, "logprob_start_len": len(prompt) - 1},
    }
    rows = post(url + "/generate", body)["meta_info"]["input_token_logprobs"]
    return [row[0] for row in rows[-len(answer.token_ids) :]]


def drift(answers: Answers, alone: Answers) -> dict[str, Any]:
    """Length, form and scripts of answers, and how many are the target's own."""
    letters = [c for a in answers for c in a.text if c.isalpha()]
    scripts = Counter(unicodedata.name(c, "?").split()[0] for c in letters)
    own = [a.token_ids == b.token_ids for a, b in zip(answers, alone, strict=True)]
    return {
        "tokens per answer": round(mean(a.num_tokens for a in answers), 1),
        "lines per answer": round(mean(a.text.count("\n") + 1 for a in answers), 1),
        "answers with markup": sum(bool(MARKUP.search(a.text)) for a in answers),
        "answers with the target's tokens": sum(own),
        "scripts of letters": ", ".join(
            f"{k.title()} {v / len(letters):.1%}" for k, v in scripts.most_common(3)
        ),
    }
