"""Scores of many prefixes in one masked pass equal one prefill per prefix.

Tolerance 1e-3 on P(yes) / (P(yes) + P(no)): float32 sums in another order, through 24
layers.
"""

import pytest

from sglang_parse.options.table import DEFAULT_JUDGE_SUFFIX
from tests.support.client import report
from tests.support.prefix_requests import judge_of, score_alone

TOLERANCE = 1e-3
OTHER_QUESTION = "Is the last step right? Yes or No."
KINDS = [
    {"parse_window": 0},
    {"parse_threshold": 0.0, "parse_window": 40, "parse_segmenter": "fixed:4"},
    {"parse_keep_rule": "longest", "parse_segmenter": "line"},
    {"parse_judge_suffix": OTHER_QUESTION, "parse_threshold": 0.2},
    {"parse_threshold": 2.0, "parse_window": 30},
]


def judged_prefixes(result) -> list[tuple[list[int], float]]:
    """(output tokens up to the boundary, its score) of every verdict of a request.

    A round is the span the target had to confirm if any, its judged spans, the span
    kept by the exact tail if any, and the target's own token.
    """
    segments = report(result)["segments"]
    committed = result["output_ids"][: segments[0]["start"]]
    prefixes = []
    draft: list[int] = []
    kept: list[int] = []
    for segment in segments:
        tokens = segment["token_ids"]
        if segment["origin"] != "target":
            draft += tokens
        if segment["score"] is not None:
            prefixes.append((committed + draft, segment["score"]))
        if segment["outcome"] != "rejected":
            kept += tokens
        if segment["origin"] == "target":
            committed = committed + kept
            draft, kept = [], []
    # SGLang trims what a round says past a stop.
    assert committed[: len(result["output_ids"])] == result["output_ids"]
    return prefixes


def check_scores(parse, tokenizer, prompts, results, kinds, most: int) -> int:
    """Compare up to `most` verdicts of each result; returns how many were compared."""
    num = 0
    for prompt, result, kind in zip(prompts, results, kinds, strict=True):
        question = kind.get("parse_judge_suffix", DEFAULT_JUDGE_SUFFIX)
        judge = judge_of(tokenizer, question)
        prefixes = judged_prefixes(result)
        step = max(1, len(prefixes) // most)
        for prefix, score in prefixes[::step][:most]:
            alone = score_alone(parse, judge, prompt, prefix)
            assert score == pytest.approx(alone, abs=TOLERANCE)
            num += 1
    return num


def test_scores_of_concurrent_requests_equal_single_prefills(parse, tokenizer, prompts):
    """Red if a suffix sees another prefix, another suffix or another request."""
    parse.flush()
    kinds = [KINDS[i % len(KINDS)] for i in range(10)]
    cases = [
        (p, {"custom": kind | {"parse_report": True}})
        for p, kind in zip(prompts, kinds, strict=False)
    ]
    results = parse.run_all(cases, 10)
    # The chat template's first tokens may be shared by then.
    assert all(r["meta_info"]["cached_tokens"] < 8 for r in results)
    num = check_scores(parse, tokenizer, prompts[:10], results, kinds, most=4)
    assert num >= 20


def test_scores_with_cached_prefixes_equal_single_prefills(parse, tokenizer, prompts):
    """Red if the pass reads a cached prefix at wrong slots, or of wrong content."""
    prompts = prompts[:5]
    custom = {"parse_report": True, "parse_threshold": 0.0, "parse_window": 20}
    parse.generate_all(prompts, 5, custom=custom)  # fills the cache
    results = parse.generate_all(prompts, 5, custom=custom)
    assert all(
        r["meta_info"]["cached_tokens"] >= len(p) - 1
        for p, r in zip(prompts, results, strict=True)
    )
    num = check_scores(parse, tokenizer, prompts, results, [custom] * 5, most=4)
    assert num >= 10


def test_scores_do_not_depend_on_the_batch(parse, prompts):
    """Red if a score changes with the neighbours (1e-4: another shape of the sums)."""
    custom = {"parse_report": True, "parse_threshold": 0.0, "parse_window": 0}

    def scores(result) -> list[float]:
        return [s for _, s in judged_prefixes(result)]

    together = parse.generate_all(prompts[:6], 6, custom=custom)
    for prompt, result in zip(prompts, together, strict=False):
        alone = parse.generate(prompt, custom=custom)
        assert scores(result) == pytest.approx(scores(alone), abs=1e-4)
