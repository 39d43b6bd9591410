"""Gold labels of judged prefixes, from the reports of answers."""

import random

import pytest

from benchmarks.embedded_answers import first_error, render_answer, split_segments
from benchmarks.train_probe.gold import (
    UNKNOWN,
    gold_label,
    gold_verdicts,
    judged_prefixes,
)
from sglang_parse.calibrate.problems import Item
from sglang_parse.embedded.task import make_problems
from sglang_parse.reporting.report import RequestReport, RoundRecord


def span(outcome, text, score=None):
    return {"outcome": outcome, "text": text, "score": score}


def test_rejected_text_stands_behind_what_was_kept():
    """Red if a rejected span stays in the prefixes of later rounds."""
    segments = [
        span("kept", "a", 0.9), span("rejected", "B", 0.1), span("rejected", "C", 0.2),
        span("kept", "b"), span("written", "c"),
        span("rejected", "x"), span("rejected", "D", 0.3), span("kept", "d", 0.8),
    ]  # fmt: skip
    assert judged_prefixes(segments) == [
        (0.9, "a"), (0.1, "aB"), (0.2, "aBC"), (0.3, "abcxD"), (0.8, "abcd")
    ]  # fmt: skip


def test_a_label_is_of_the_verdict_with_this_place_and_score():
    """Red if a pair gets the label of another verdict."""
    verdicts = [(0.9, True), (0.1, False)]
    assert [gold_label(verdicts, k, s) for k, (s, _) in enumerate(verdicts)] == [1, 0]
    assert gold_label(verdicts, 0, 0.1) == UNKNOWN
    assert gold_label(verdicts, 2, 0.1) == gold_label([], 0, 0.9) == UNKNOWN


@pytest.mark.parametrize("seed", range(20))
def test_labels_are_the_checkers_verdicts_on_every_judged_prefix(seed):
    """Red if a report's spans do not give back the text that a verdict was on: tokens
    are characters here, and rounds keep, reject and write at random."""
    rng = random.Random(seed)
    (problem,) = make_problems(1, seed)
    right = split_segments(render_answer(problem, "A"))
    report, output, expected = RequestReport("semantic", "", True), "", []
    scores = iter(range(1, 1000))
    while len(output) < len("".join(right)):
        left = split_segments("".join(right)[len(output) :])
        lines = [x if rng.random() < 0.7 else x.replace(" ", "_", 1) for x in left]
        bad = next((k for k, x in enumerate(lines) if x != left[k]), len(lines))
        ends = [len("".join(lines[: k + 1])) for k in range(len(lines))]
        given = [next(scores) / 1000 for _ in ends]
        for end, score in zip(ends, given, strict=True):
            text = output + "".join(lines)[:end]
            expected.append((score, first_error(problem, text) is None))
        num_judged = ends[bad - 1] if bad else 0
        own = "" if num_judged == len("".join(left)) else left[bad][0]
        accepted = "".join(left)[:num_judged] + own
        report.record(
            RoundRecord(
                output_len=len(output),
                accept_tokens=[ord(c) for c in accepted or "\n"],
                draft_tokens=[ord(c) for c in "".join(lines)],
                boundaries=ends,
                scores=given,
                num_judged=num_judged,
            )
        )
        output += accepted
    ids = [ord(c) for c in output]
    report.finish(ids)
    found = report.as_dict(ids, lambda ids: "".join(map(chr, ids)))["segments"]
    item = Item(problem.prompt, problem)
    assert gold_verdicts(item, found) == expected
    assert gold_verdicts(Item("a", "b"), found) == []
