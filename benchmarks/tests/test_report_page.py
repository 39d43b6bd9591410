"""The page of `python -m benchmarks.report`, and what is measured for it."""

import json
import random
import re

import pytest

from benchmarks import report
from benchmarks.report_page import ALONE, SERVED, report_page
from sglang_parse.demo.figures import RequestResult

TEXT = "Step 1: 2 plus 3 makes 5.\nStep 2: 5 plus 1 makes 6.\nAnswer: 6"


def answer(text=TEXT, ids=(7, 8, 9), **more):
    return RequestResult(text, ids, len(ids), True, 1.0, 0.1, **more)


def arm(ratio, **more):
    return {
        **{"problems": 4, "concurrency": 2, "accuracy": 0.75, "output_tok_s": 80.0},
        **{"accuracy_low": 0.3, "accuracy_high": 0.95, "lost": 1, "gained": 0},
        **{"latency_p50_s": 1.0, "latency_p95_s": 2.0, "ttft_p95_s": 0.1},
        **{"passes_per_answer": 3.0, "ratios": [ratio, ratio]},
        "equivalence": {"low": -9.0, "high": 1.5, "margin": 1.0, "is_shown": False},
        "drift": report.drift([answer()], [answer()]),
    } | more


def planted(scores, third, kind="a number", item=0):
    lines = [f"line {k}\n" for k in range(len(scores))]
    row = {"item": item, "kind": kind, "third": third, "was": "<b>"}
    return row | {"lines": lines, "scores": scores}


FIGURES = {
    "target": "models/<target>",
    "draft": None,
    "settings": {"threshold": 0.5},
    "questions": "q.jsonl",
    "right_by": "its reference",
    "arms": {ALONE: arm(1.0), "exact": arm(1.25), SERVED: arm(2.5)},
    "counts": {"draft_tokens": 200, "kept_tokens": 150, "matched_tokens": 30},
    "planted": [
        planted([0.9, 0.8, 0.1], 2),
        planted([0.9, 0.7], 1, "a foreign line"),
    ],
    "logprob": {"let stand by a verdict": -0.125},
    "worse": [{"question": "<q>", ALONE: "6", SERVED: "7"}],
    "provenance": {"commit": "</script>"},
}


@pytest.fixture(scope="module")
def page():
    return report_page(FIGURES)


@pytest.mark.parametrize(
    "shown",
    [
        "are not shown to be right as often as the target's to within 1 point: the "
        "change lies above -9.0 and below 1.5 points",
        "<td>2.50x  2.50x</td>",
        "<td>75.0% (30.0 to 95.0)</td>",
        "<td>let stand by a verdict</td><td>120 of 200 (60.0%)</td>",
        "<td>wrong ones</td><td>2</td><td>1 of 2 (50.0%)</td>",
        "<td>wrong: a foreign line</td><td>1</td><td>1 of 1 (100.0%)</td>",
        "<td>right prefixes</td><td>2</td>",
        "<td>wrong in the last third of the answer</td><td>1</td><td>0 of 1 (0.0%)",
        "<td>let stand by a verdict</td><td>-0.125</td>",
        "area under the curve: 1.000",
        "<pre>instead of: &lt;b&gt;</pre>",
    ],
)
def test_page_shows_its_figures(page, shown):
    """Red if a figure is left out, counted twice or computed otherwise."""
    assert shown.replace("'", "&#x27;") in page


def test_page_holds_its_data_and_escapes_texts(page):
    """Red if a text of a model could end the data, or is read as markup."""
    (data,) = re.findall(r'id="figures">(.*?)</script>', page, re.DOTALL)
    assert json.loads(data) == FIGURES
    assert "<target>" not in page.replace(data, "") and page.count("<svg") == 2


def test_planted_lines_are_wrong_and_stand_at_their_depth():
    """Red if a planted line is one of the answer's own, or an answer that is not right
    is used."""
    other = "One line.\nAnother line.\n"
    answers, right = [answer(), answer(other), answer()], [True, True, False]
    kinds = set()
    for seed in range(20):
        for row in report.plant(answers, right, random.Random(seed)):
            own = answers[row["item"]].text.splitlines(keepends=True)
            depth = len(row["lines"]) - 1
            assert row["item"] < 2 and row["was"] == own[depth]
            assert row["lines"][:-1] == own[:depth] and row["lines"][-1] not in own
            assert row["third"] == 3 * depth // len(own)
            kinds.add((row["item"], row["kind"]))
    assert kinds == {(0, "a number"), (0, "a foreign line"), (1, "a foreign line")}


def test_tokens_that_a_verdict_let_stand():
    """Red if tokens kept token by token, or rejected ones, count as judged."""
    segments = [
        {"outcome": "kept", "score": 0.9, "start": 0, "token_ids": [7]},
        {"outcome": "rejected", "score": 0.1, "start": 1, "token_ids": [1, 1]},
        {"outcome": "kept", "score": None, "start": 1, "token_ids": [8]},
        {"outcome": "kept", "score": 0.8, "start": 2, "token_ids": [9, 9]},
    ]
    marks = report.kept_by_verdict(answer(report={"segments": segments}))
    assert marks == [True, False, True]
    assert report.marked_mean([[-1.0, -5.0, -2.0]], [marks]) == -1.5
    assert report.marked_mean([[-1.0]], [[False]]) is None
