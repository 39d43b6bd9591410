"""Counters of one request, each defined once."""

import json

import pytest

from sglang_parse.metrics import RequestReport, SegmentReport


def report(want_segments: bool = True, fallback: str = "") -> RequestReport:
    return RequestReport("semantic", fallback, want_segments)


def first_failure_round(r: RequestReport) -> None:
    """Draft of 6, boundaries 2 and 5, the second rejected, one token matched."""
    r.record(
        output_len=10,
        draft_tokens=[1, 2, 3, 4, 5, 6],
        num_new_drafts=4,
        boundaries=[2, 5],
        scores=[0.9, 0.1],
        num_judged=2,
        num_matched=1,
        accept_tokens=[1, 2, 3, 99],
    )


def test_round_is_counted():
    """Red if a counter changes its meaning: see the docstring of RequestCounters."""
    r = report()
    first_failure_round(r)
    assert r.counters.as_dict() == {
        "target_passes": 1,
        "draft_tokens": 4,
        "judged_segments": 2,
        "kept_segments": 1,
        "judged_tokens": 5,
        "kept_tokens": 3,
        "matched_tokens": 1,
        "written_tokens": 1,
    }


def test_counters_add_up_over_rounds():
    """Red if a round replaces what earlier rounds counted."""
    r = report()
    first_failure_round(r)
    first_failure_round(r)
    assert r.counters.target_passes == 2
    assert r.counters.kept_tokens + r.counters.written_tokens == 8


def test_plain_round_writes_one_token():
    """Red if a round without draft counts anything else."""
    r = report()
    r.record(
        output_len=3,
        draft_tokens=[],
        num_new_drafts=0,
        boundaries=[],
        scores=[],
        num_judged=0,
        num_matched=0,
        accept_tokens=[7],
    )
    assert r.counters.written_tokens == r.counters.target_passes == 1
    assert r.counters.kept_tokens == r.counters.judged_tokens == 0
    assert r.segments == [SegmentReport("target", "written", 3, (7,))]


def test_segments_tell_the_round_in_order():
    """Red if spans, offsets or scores move to another segment."""
    r = report()
    first_failure_round(r)
    assert r.segments == [
        SegmentReport("draft", "kept", 10, (1, 2), 0.9),
        SegmentReport("draft", "rejected", 12, (3, 4, 5), 0.1),
        SegmentReport("draft", "kept", 12, (3,)),
        SegmentReport("target", "written", 13, (99,)),
    ]


def test_segments_of_the_output_spell_the_output():
    """Red if kept and written spans do not concatenate to the accepted tokens."""
    r = report()
    first_failure_round(r)
    spans = [s for s in r.segments if s.outcome != "rejected"]
    assert [t for s in spans for t in s.token_ids] == [1, 2, 3, 99]
    at = 10
    for span in spans:
        assert span.start == at
        at += len(span.token_ids)


def test_segments_are_kept_only_on_request():
    """Red if every request carries its segments through the scheduler."""
    r = report(want_segments=False)
    first_failure_round(r)
    assert r.segments == []
    assert "segments" not in r.as_dict()


@pytest.mark.parametrize("fallback", ["", "logprobs"])
def test_as_dict_is_json_and_names_the_fallback(fallback):
    """Red if meta_info cannot be serialised or an empty fallback is shown."""
    r = report(fallback=fallback)
    first_failure_round(r)
    result = json.loads(json.dumps(r.as_dict()))
    assert result["mode"] == "semantic"
    assert result.get("fallback", "") == fallback
    assert ("fallback" in result) == bool(fallback)
    assert result["segments"][0] == {
        "origin": "draft",
        "outcome": "kept",
        "start": 10,
        "token_ids": [1, 2],
        "score": 0.9,
    }
