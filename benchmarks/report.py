"""One HTML page about a running PARSE server: is it faster, and are answers as good?

    python -m benchmarks.report --url http://127.0.0.1:30000 --prompts FILE --out r.html

FILE has a problem a line, with `prompt` and perhaps `answer`. The server's own settings
are measured in turns with exact mode and with its target alone. Then the judge is
asked about right answers in which a line was made wrong, and the target about the
log-probability of what its verdicts let stand. The page holds its figures as JSON too.
"""

from __future__ import annotations

import argparse
import random
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from typing import Any

from tqdm import tqdm

from benchmarks.harness.stats import equivalence, wilson_interval
from benchmarks.provenance import provenance, shown_path
from benchmarks.report_page import ALONE, SERVED, report_page
from sglang_parse.calibrate.calibration import WARM_UP, grade
from sglang_parse.calibrate.problems import load_items
from sglang_parse.calibrate.served import server_info
from sglang_parse.cli.calibrate_command import json_object
from sglang_parse.cli.common import check_writable
from sglang_parse.cli.trace import post
from sglang_parse.demo.figures import RequestResult, summarise
from sglang_parse.demo.load import Prompt, encode_chat, load_tokenizer, measure

TURNS = 4
ARMS: dict[str, dict[str, Any]] = {
    ALONE: {"parse_mode": "off"},
    "exact": {"parse_mode": "exact"},
    SERVED: {"parse_report": True},
}
MARKUP = re.compile(r"(?m)^(?:```|#+ |[-*] |\d+\. |\|)")
# Not at a line's start, where it is the number of a list.
LAST_NUMBER = re.compile(r"(?<=\s)\d+(?=\D*$)")
Answers = Sequence[RequestResult]


def run_report(options: argparse.Namespace) -> None:
    """Measure the server and write the page. Raises ValueError before any request is
    sent, LoadError or RuntimeError when one fails."""
    url, path = options.url, options.prompts
    items = load_items(path, problems=options.problems, seed=options.seed)
    info = server_info(url)
    parse = ((info.get("internal_states") or [{}])[0]).get("parse")
    if not parse:
        raise ValueError(
            f"--url {url}: the server there does not serve with PARSE; start one with "
            "--speculative-algorithm PARSE."
        )
    tokenizer = load_tokenizer(info["tokenizer_path"])
    limit = options.max_new_tokens
    encoded = [encode_chat(tokenizer, i.prompt, options.chat_template) for i in items]
    prompts = [Prompt(None, ids, limit) for ids in encoded]
    found, walls = in_turns(url, prompts, options.concurrency)
    alone, served = found[ALONE], found[SERVED]
    has_gold = all(item.reference is not None for item in items)
    right = {
        arm: grade(items, alone, found[arm], has_gold=has_gold).right for arm in ARMS
    }
    planted = plant(alone, right[ALONE], random.Random(options.seed))
    with ThreadPoolExecutor(options.concurrency) as threads:
        for row, scores in zip(
            planted,
            threads.map(lambda p: verify(url, encoded[p["item"]], p["lines"]), planted),
            strict=True,
        ):
            row["scores"] = scores
        own = list(threads.map(lambda p, r: logprobs(url, p, r), encoded, alone))
        ours = list(threads.map(lambda p, r: logprobs(url, p, r), encoded, served))
    kept = [kept_by_verdict(r) for r in served]
    arms = {}
    for arm, answers in found.items():
        figures = summarise(arm, options.concurrency, answers, sum(walls[arm]))
        shown = equivalence(right[ALONE], right[arm], margin=options.margin)
        low, high = wilson_interval(sum(right[arm]), len(items))
        arms[arm] = figures.as_dict() | {
            "accuracy": mean(right[arm]),
            "accuracy_low": low,
            "accuracy_high": high,
            "lost": sum(a > b for a, b in zip(right[ALONE], right[arm], strict=True)),
            "gained": sum(a < b for a, b in zip(right[ALONE], right[arm], strict=True)),
            "ratios": [a / b for a, b in zip(walls[ALONE], walls[arm], strict=True)],
            "equivalence": vars(shown) | {"is_shown": shown.is_shown},
            "drift": drift(answers, alone),
        }
    numbers = ((k, v) for r in served for k, v in (r.report or {}).items())
    counts: Counter[str] = Counter()
    for key, value in numbers:
        if isinstance(value, int):
            counts[key] += value
    page = report_page(
        {
            "target": shown_path(info["model_path"]),
            "draft": shown_path(info.get("speculative_draft_model_path") or ""),
            "settings": parse["settings"],
            "questions": Path(path).name if path else "embedded",
            "right_by": "its reference"
            if has_gold
            else "the target's own final answer",
            "arms": arms,
            "counts": counts,
            "planted": planted,
            "logprob": {
                "the target's own answers": marked_mean(own, None),
                "let stand by a verdict": marked_mean(ours, kept),
                "all of these answers": marked_mean(ours, None),
            },
            "worse": [
                {"question": item.prompt, ALONE: a.text, SERVED: b.text}
                for k, (item, a, b) in enumerate(zip(items, alone, served, strict=True))
                if right[ALONE][k] and not right[SERVED][k]
            ],
            "provenance": provenance(),
        }
    )
    options.out.write_text(page, encoding="utf-8")


def in_turns(
    url: str, prompts: Sequence[Prompt], concurrency: int
) -> tuple[dict[str, list[RequestResult]], dict[str, list[float]]]:
    """Answers of each arm, and its seconds in each turn. Their order rotates."""
    found: dict[str, list[RequestResult]] = {arm: [] for arm in ARMS}
    walls: dict[str, list[float]] = {arm: [] for arm in ARMS}
    ends = [turn * len(prompts) // TURNS for turn in range(TURNS + 1)]
    with tqdm(total=len(ARMS) * len(prompts), unit="req") as bar:
        for turn, (start, end) in enumerate(zip(ends, ends[1:], strict=False)):
            names = list(ARMS)
            for arm in names[turn % len(names) :] + names[: turn % len(names)]:
                done = measure(
                    url,
                    prompts[start:end],
                    concurrency=concurrency,
                    warm_up=prompts[:WARM_UP] if turn == 0 else (),
                    custom_params=ARMS[arm],
                    on_answer=bar.update,
                )
                found[arm] += done.results
                walls[arm].append(done.wall_s)
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
    custom = {"parse_verify": list(lines)}
    sampling = {"max_new_tokens": 1, "custom_params": custom}
    body = {"input_ids": list(prompt), "sampling_params": sampling}
    report = post(url + "/generate", body)["meta_info"]["parse"][0]
    return [segment["score"] for segment in report["segments"]]


def logprobs(url: str, prompt: Sequence[int], answer: RequestResult) -> list[float]:
    """The target's log-probability of each token of an answer."""
    sampling = {"max_new_tokens": 1, "custom_params": {"parse_mode": "off"}}
    body = {
        "input_ids": [*prompt, *answer.token_ids],
        "sampling_params": sampling,
        "return_logprob": True,
        "logprob_start_len": len(prompt) - 1,
    }
    rows = post(url + "/generate", body)["meta_info"]["input_token_logprobs"]
    return [row[0] for row in rows[-len(answer.token_ids) :]]


def kept_by_verdict(answer: RequestResult) -> list[bool]:
    """For each token of an answer whether a verdict let it stand."""
    marks = [False] * len(answer.token_ids)
    for segment in (answer.report or {}).get("segments", ()):
        if segment["outcome"] == "kept" and segment.get("score") is not None:
            for k in range(
                segment["start"], segment["start"] + len(segment["token_ids"])
            ):
                marks[k : k + 1] = [True] * len(marks[k : k + 1])
    return marks


def marked_mean(
    values: Sequence[Sequence[float]], marks: Sequence[Sequence[bool]] | None
) -> float | None:
    """The mean of the values that are marked, all without marks; None of nothing."""
    flat = [v for of_one in values for v in of_one]
    if marks is not None:
        chosen = [m for of_one in marks for m in of_one]
        flat = [v for v, is_marked in zip(flat, chosen, strict=True) if is_marked]
    return mean(flat) if flat else None


def drift(answers: Answers, alone: Answers) -> dict[str, Any]:
    """Length, form and scripts of answers, and how many are the target's own."""
    letters = [c for a in answers for c in a.text if c.isalpha()]
    scripts = Counter(unicodedata.name(c, "?").split()[0] for c in letters)
    return {
        "tokens": mean(a.num_tokens for a in answers),
        "lines": mean(a.text.count("\n") + 1 for a in answers),
        "markup": mean(bool(MARKUP.search(a.text)) for a in answers),
        "identical": mean(
            a.token_ids == b.token_ids for a, b in zip(answers, alone, strict=True)
        ),
        "scripts": {k: v / len(letters) for k, v in scripts.most_common(3)},
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--url", default="http://127.0.0.1:30000", help="of the server")
    parser.add_argument("--out", type=Path, required=True, help="HTML to write")
    parser.add_argument(
        "--prompts", default="", help="lines of JSON; default: the embedded task"
    )
    parser.add_argument("--problems", type=int, default=200, help="default: 200")
    parser.add_argument("--concurrency", type=int, default=8, help="default: 8")
    parser.add_argument(
        "--margin",
        type=float,
        default=1.0,
        help="points of accuracy within which answers are as good; default: 1",
    )
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument("--max-new-tokens", type=int, default=2048)
    parser.add_argument("--chat-template-json", dest="chat_template", type=json_object)
    options = parser.parse_args(argv)
    options.url = options.url.rstrip("/")
    try:
        check_writable(options.out, "--out")
        run_report(options)
    except (RuntimeError, ValueError) as e:
        parser.exit(1, f"benchmarks.report: {e}\n")
    return 0


if __name__ == "__main__":
    main()
