"""The drawing of one answer."""

import pytest

from sglang_parse.cli.trace_text import answer_spans, draw_answer, legend, most_telling
from sglang_parse.demo.figures import RequestResult


def segment(origin, outcome, text_start, text, score=None):
    return {
        "origin": origin,
        "outcome": outcome,
        "text_start": text_start,
        "text": text,
        "score": score,
    }


ANSWER = "Step 1: a.\nSo c.\n!"
REPORT = {
    "segments": [
        segment("client", "kept", 4, " 1:", 0.9),
        segment("draft", "kept", 7, " a.\n", 0.8),
        segment("draft", "rejected", 11, "So b.", 0.1),
        segment("draft", "rejected", 11, " Bad.", 0.2),
        segment("draft", "kept", 11, "So"),
        segment("target", "written", 13, " c.\n"),
    ]
}


def test_spans_hold_the_whole_answer_once_in_order():
    """Red if output is lost, or what was rejected appears in it."""
    spans = answer_spans(ANSWER, REPORT)
    assert "".join(s.text for s in spans if s.kind != "rejected") == ANSWER
    assert [s.kind for s in spans] == [
        *("written", "client", "kept", "rejected", "agreed", "written", "written")
    ]
    assert spans[3].text == "So b." and spans[3].num_later == 1


@pytest.mark.parametrize(
    "raw",
    ["\x00", "\x07", "\x1b", "\r", "\x9b", "\u202a", "\u202e", "\u2066", "\u2069"],
)
def test_controls_do_not_reach_the_terminal(raw):
    """Red if an answer can clear the screen, change the title or turn text around."""
    spans = answer_spans(f"a{raw}b\tc\n", {})
    assert [s.text for s in spans] == ["a\ufffdb\tc\n"]
    rejected = segment("draft", "rejected", 0, f"a{raw}", 0.1)
    drawn = draw_answer(answer_spans("", {"segments": [rejected]})).plain
    assert drawn == "x a\ufffd [0.10]\n"


@pytest.mark.parametrize("field", ["text_start", "text", "outcome", "score", "origin"])
def test_a_segment_without_a_field_is_one_sentence(field):
    """Red if the report of another version ends in a KeyError."""
    one = {k: v for k, v in REPORT["segments"][0].items() if k != field}
    with pytest.raises(ValueError, match=f"lacks '{field}'; expected a report"):
        answer_spans(ANSWER, {"segments": [one]})


def test_answer_without_segments_is_the_targets():
    (span,) = answer_spans("abc", {})
    assert (span.kind, span.text) == ("written", "abc")
    assert answer_spans("", {}) == []


def test_drawing_strikes_the_rejected_above_its_replacement():
    drawing = draw_answer(answer_spans(ANSWER, REPORT), marks=True)
    assert drawing.plain.splitlines() == [
        "  «Step» 1: [0.90] a. [0.80]",
        "x So b. [0.10, 1 later dropped]",
        "  So« c.»",
        "  «!»",
    ]
    struck = [s for s in drawing.spans if "strike" in str(s.style)]
    assert [drawing.plain[s.start : s.end] for s in struck] == ["So b."]


def test_doubtful_scores_stand_out():
    """Red if a score is drawn alike whatever it is."""
    drawing = draw_answer(answer_spans(ANSWER, REPORT))
    styles = {drawing.plain[s.start : s.end]: str(s.style) for s in drawing.spans}
    assert (styles[" [0.90]"], styles[" [0.80]"]) == ("dim", "dim yellow")


def test_legend_has_clients_only_where_there_is_one():
    assert "client" not in legend().plain
    assert "client's text, kept [score]" in legend(has_client=True).plain
    assert "«written by the target»" in legend(marks=True).plain


def make_result(judged, kept, *, correct=True):
    report = {"judged_segments": judged, "kept_segments": kept}
    return RequestResult("", (1, 2), 2, correct, 1.0, 0.5, report)


def test_most_telling_answer_is_right_and_has_a_rejection():
    results = [
        make_result(3, 3),
        make_result(3, 1, correct=False),
        make_result(3, 1),
    ]
    assert most_telling(results) == 2
    assert most_telling(results[:2]) == 0


def test_a_probes_verdict_is_told_from_the_questions():
    """Red if nobody can see in a trace who gave a verdict."""
    asked, read = (
        segment("draft", "kept", at, "a\n", 0.8) | {"judge": judge}
        for at, judge in ((0, "suffix"), (2, "probe"))
    )
    spans = answer_spans("a\na\n", {"segments": [asked, read]})
    drawn = draw_answer(spans).plain.splitlines()
    assert drawn == ["  a [0.80]", "  a [0.80 by the probe]"]
