"""Counters of one request, each defined once."""

import json

import pytest

from sglang_parse.metrics import RequestReport, RoundRecord


def report(want_segments: bool = True, fallback: str = "") -> RequestReport:
    return RequestReport("semantic", fallback, want_segments)


FIRST = [40, 41, 42, 43]  # output tokens before the round


def first_failure_round(r: RequestReport, output_len: int = 4) -> None:
    """Draft of 6, boundaries 2 and 5, the second rejected, one token matched."""
    r.record(
        RoundRecord(
            output_len=output_len,
            draft_tokens=[1, 2, 3, 4, 5, 6],
            num_new=4,
            num_client=1,
            boundaries=[2, 5],
            scores=[0.9, 0.1],
            num_judged=2,
            num_matched=1,
            accept_tokens=[1, 2, 3, 99],
        )
    )


def as_dict(r: RequestReport, output_ids: list[int]) -> dict:
    r.finish(output_ids)
    return r.as_dict(output_ids, lambda ids: "".join(f"<{i}>" for i in ids))


def test_round_is_counted():
    """Red if a counter changes its meaning: see the docstring of RequestCounters."""
    r = report()
    first_failure_round(r)
    assert r.counters.as_dict() == {
        "target_passes": 1,
        "draft_tokens": 4,
        "eagle_draft_tokens": 0,
        "eagle_kept_tokens": 0,
        "client_tokens": 1,
        "judged_segments": 2,
        "kept_segments": 1,
        "judged_tokens": 5,
        "kept_tokens": 3,
        "kept_client_tokens": 1,
        "matched_tokens": 1,
        "written_tokens": 5,
    }


def test_a_recovering_head_is_counted_as_agreement():
    """Red if tokens that the target confirmed count as judged, or a head that failed
    counts as kept."""
    r = report()
    stood = {"draft_tokens": [1, 2, 3, 4, 5, 6], "num_new": 3, "num_eagle": 3}
    stood |= {"num_head": 2, "boundaries": [5], "scores": [0.9]}
    r.record(RoundRecord(0, [1, 2, 3, 4, 5, 99], num_judged=5, **stood))
    counts = r.counters
    assert (counts.kept_tokens, counts.matched_tokens) == (5, 2)
    assert (counts.judged_tokens, counts.kept_segments) == (3, 1)
    assert (counts.eagle_draft_tokens, counts.eagle_kept_tokens) == (3, 3)
    r.record(RoundRecord(6, [1, 98], num_matched=1, **stood))
    assert (counts.kept_tokens, counts.matched_tokens) == (6, 3)
    assert (counts.kept_segments, counts.eagle_kept_tokens) == (1, 4)
    spans = as_dict(r, [1, 2, 3, 4, 5, 99, 1, 98])["segments"]
    assert [(s["outcome"], s["start"], len(s["token_ids"])) for s in spans] == [
        ("kept", 0, 2), ("kept", 2, 3), ("written", 5, 1),
        ("rejected", 6, 2), ("rejected", 6, 3), ("kept", 6, 1), ("written", 7, 1),
    ]  # fmt: skip


def test_a_stop_inside_a_head_is_taken_back():
    """Red if counters keep tokens that a stop string cut off."""
    r = report()
    r.record(
        RoundRecord(
            0, [1, 2, 3, 4, 9], [1, 2, 3, 4], num_eagle=2, num_head=2,
            boundaries=[3], scores=[0.9], num_judged=3, num_matched=1,
        )
    )  # fmt: skip
    r.finish([1])
    counts = r.counters
    assert (counts.kept_tokens, counts.matched_tokens, counts.written_tokens) == (
        1,
        1,
        0,
    )
    assert counts.eagle_kept_tokens == 1


def test_counters_add_up_over_rounds():
    """Red if a round replaces what earlier rounds counted."""
    r = report()
    first_failure_round(r)
    first_failure_round(r, 8)
    assert r.counters.target_passes == 2
    assert r.counters.kept_tokens + r.counters.written_tokens == 12


def test_plain_rounds_are_one_written_span():
    """Red if a round without draft counts anything else, or tokens get lost."""
    r = report()
    r.record(RoundRecord(3, [7]))
    r.record(RoundRecord(4, [8]))
    assert r.counters.written_tokens == 5
    assert r.counters.target_passes == 2
    assert r.counters.kept_tokens == r.counters.judged_tokens == 0
    (span,) = as_dict(r, [4, 5, 6, 7, 8])["segments"]
    assert span["token_ids"] == (4, 5, 6, 7, 8)


def test_segments_tell_the_round_in_order():
    """Red if spans, offsets, texts or scores move to another segment."""
    r = report()
    first_failure_round(r)
    result = as_dict(r, [*FIRST, 1, 2, 3, 99])
    fields = ("origin", "outcome", "start", "token_ids", "score", "text", "text_start")
    assert [tuple(s[f] for f in fields) for s in result["segments"]] == [
        ("target", "written", 0, tuple(FIRST), None, "<40><41><42><43>", 0),
        ("client", "kept", 4, (1,), 0.9, "<1>", 16),
        ("draft", "kept", 5, (2,), 0.9, "<2>", 19),
        ("draft", "rejected", 6, (3, 4, 5), 0.1, "<3><4><5>", 22),
        ("draft", "kept", 6, (3,), None, "<3>", 22),
        ("target", "written", 7, (99,), None, "<99>", 25),
    ]


@pytest.mark.parametrize("num_left", range(9))
def test_a_stop_inside_a_round_is_not_counted(num_left):
    """Red if tokens after a stop string or end token stay in counters or segments."""
    r = report()
    first_failure_round(r)
    output = [*FIRST, 1, 2, 3, 99][:num_left]
    result = as_dict(r, output)
    spans = [s for s in r.segments if s.outcome != "rejected"]
    assert [t for s in spans for t in s.token_ids] == output
    if num_left >= 4:
        assert result["kept_tokens"] + result["written_tokens"] == num_left
        assert result["kept_tokens"] == min(3, num_left - 4)
        assert result["kept_client_tokens"] == min(1, num_left - 4)


def test_judging_alone_keeps_nothing_in_the_output():
    """Red if parse_verify counts tokens that were never emitted."""
    r = report()
    r.record(
        RoundRecord(
            output_len=0,
            accept_tokens=(),
            draft_tokens=[1, 2, 3],
            num_client=3,
            boundaries=[1, 3],
            scores=[0.9, 0.2],
            num_judged=1,
            num_passes=2,
        )
    )
    result = as_dict(r, [9])
    assert result["target_passes"] == 2
    assert result["kept_tokens"] == 0
    spans = [(s["outcome"], s["start"], s["text"]) for s in result["segments"]]
    assert spans == [("kept", 0, "<1>"), ("rejected", 1, "<2><3>")]


def test_segments_are_kept_only_on_request():
    """Red if every request carries its segments through the scheduler."""
    r = report(want_segments=False)
    first_failure_round(r)
    assert r.segments == []
    assert "segments" not in as_dict(r, FIRST)


@pytest.mark.parametrize("fallback", ["", "logprobs"])
def test_as_dict_is_json_and_names_the_fallback(fallback):
    """Red if meta_info cannot be serialised or an empty fallback is shown."""
    r = report(fallback=fallback)
    first_failure_round(r)
    result = json.loads(json.dumps(as_dict(r, FIRST)))
    assert result["mode"] == "semantic"
    assert result.get("fallback", "") == fallback
    assert ("fallback" in result) == bool(fallback)
