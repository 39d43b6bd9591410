"""The page of `sglang-parse report`, and what is measured for it."""

import json
import random
import re

import pytest

from sglang_parse.cli import main as cli
from sglang_parse.cli import pair_report as report
from sglang_parse.cli.pair_page import ALONE, SERVED, report_page
from sglang_parse.demo.figures import RequestResult

TEXT = "Step 1: 2 plus 3 makes 5.\nStep 2: 5 plus 1 makes 6.\nAnswer: 6"


def answer(text=TEXT, ids=(7, 8, 9), **more):
    return RequestResult(text, ids, len(ids), True, 1.0, 0.1, **more)


def arm(ratio):
    drift = report.drift([answer()], [answer()])
    change = {"change of accuracy, points": [-9.0, 1.5]}
    return {"ratio to target": f"{ratio:.2f}x", **change, **drift}


def planted(scores, third, kind="a number", item=0):
    lines = [f"line {k}\n" for k in range(len(scores))]
    row = {"item": item, "kind": kind, "third": third, "was": "<b>"}
    return row | {"lines": lines, "scores": scores}


FIGURES = {
    "target": "models/<target>",
    "draft": "none",
    "versions": "</script>",
    "settings": {"threshold": 0.5},
    "margin": 1.0,
    "arms": {ALONE: arm(1.0), "exact": arm(1.25), SERVED: arm(2.5)},
    "counts": {"tokens drafted": 200, "tokens kept": 150, "tokens by the target": 0},
    "planted": [
        planted([0.9, 0.8, 0.1], 2),
        planted([0.9, 0.7], 1, "a foreign line"),
    ],
    "worse": [{"question": "<q>", ALONE: "6", SERVED: "7"}],
}


@pytest.fixture(scope="module")
def page():
    return report_page(FIGURES)


@pytest.mark.parametrize(
    "shown",
    [
        "are not shown to be right as often as the target's to within 1 percentage "
        "points: the change lies above -9.0 and below 1.5, each",
        "<td>ratio to target</td><td>1.00x</td><td>1.25x</td><td>2.50x</td>",
        "<td>tokens kept</td><td>150</td>",
        "<td>wrong ones</td><td>1</td><td>2</td><td>97.5%</td>",
        "<td>wrong: a foreign line</td><td>1</td><td>1</td><td>100.0%</td>",
        "<td>right prefixes</td><td>2</td><td>2</td>",
        "<td>wrong: in third 3 of 3 of the answer</td><td>0</td><td>1</td>",
        # Of the right ones half pass, then all; then half of the wrong ones; then all.
        'points="20,220 20.0,120.0 20.0,20.0 170.0,20.0 320.0,20.0"',
        "instead of: &lt;b&gt;</pre>",
        "<pre>question:\n&lt;q&gt;\n\ntarget alone:\n6\n\nas served:\n7</pre>",
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


@pytest.mark.parametrize(
    ("change", "said"),
    [((-0.9, 0.9), "served are right"), ((-1.0, 0.1), "served are not shown")],
)
def test_equivalence_holds_inside_the_margin_alone(change, said):
    arms = FIGURES["arms"] | {SERVED: arm(2) | {"change of accuracy, points": change}}
    assert said in report_page(FIGURES | {"arms": arms})


def test_report_refuses_before_it_asks(capsys, tmp_path):
    """Red if a number that no run has is found out after a connection."""
    out = ["--out", str(tmp_path / "r.html"), "--problems", "0"]
    assert cli.main(["report", *out]) == 1
    assert "--problems" in capsys.readouterr().err
