"""Tokens by drafter: who wrote what was kept, over rounds and past a stop."""

from sglang_parse.reporting.drafters import (
    DrafterCounters,
    first_tokens,
    tokens_behind,
)
from sglang_parse.reporting.report import RequestReport
from sglang_parse.reporting.telemetry import Telemetry
from sglang_parse.requests.draft import Draft
from tests.support.fake_engine import (
    LINE,
    FakeDrafter,
    FakeServer,
    FakeTarget,
    make_request,
)

RUNS = (("a", 2), ("b", 3), ("a", 1))


def test_runs_are_cut_anywhere():
    """Red if a cut inside a run, at its end or outside all runs loses a token."""
    tokens = [name for name, num in RUNS for _ in range(num)]
    for num in range(-1, 8):
        for found, expected in (
            (first_tokens(RUNS, num), tokens[: max(0, num)]),
            (tokens_behind(RUNS, num), tokens[max(0, num) :]),
        ):
            assert [n for n, count in found for _ in range(count)] == expected


def test_what_is_taken_back_counts_no_more():
    """Red if what a stop cut off stays counted."""
    one = DrafterCounters()
    one.add_drafted(RUNS)
    one.add_kept(RUNS)
    one.add_kept([("b", 3), ("a", 1)], sign=-1)
    assert one.as_dict() == {"drafted_by": {"a": 3, "b": 3}, "kept_by": {"a": 2}}


def serve():
    """`copy` writes a line and a half, `model` the rest; the target agrees with the
    first token behind what is kept."""
    copied = (20, 21, LINE, 22)
    rest = (23, LINE, 24, 25)
    text = (10, 11, 12, *copied, *rest)

    def own(tokens):
        return (*text, 9)[len(tokens)] if tokens == text[: len(tokens)] else 9

    drafters = [
        FakeDrafter(lambda tokens: copied if len(tokens) == 3 else (), name="copy"),
        FakeDrafter(lambda tokens: text[len(tokens) :]),
    ]
    return FakeServer(FakeTarget(own, lambda tokens: 0.9), drafters)


def test_tokens_that_wait_keep_their_drafter():
    """Red if a token that is kept in a later round than it was drafted in counts as
    nobody's or another's."""
    server, req = serve(), make_request()
    (first,) = server.round(req)
    assert first.draft.parts == (("copy", 4), ("model", 4))
    assert req.state.pending == (25,) and req.state.draft.held == (("model", 1),)
    server.round(req)
    report = req.state.report
    assert report.drafters.kept["copy"] == 4
    # Token 24 is the target's own choice behind the second line, token 25 is kept.
    assert report.drafters.kept["model"] == 3
    counters = report.counters
    assert sum(report.drafters.kept.values()) == counters.kept_tokens
    assert report.drafters.drafted["model"] == counters.draft_tokens


def test_what_a_stop_cuts_off_is_taken_back():
    """Red if tokens behind a stop count as their drafter's."""
    server, req = serve(), make_request()
    server.round(req)
    report = req.state.report
    report.finish(req.output_ids[:3])
    assert report.drafters.as_dict()["kept_by"] == {"copy": 2}


def test_clients_tokens_are_no_drafters():
    """Red if the client's part of a draft shifts what drafters wrote behind it."""
    server, req = serve(), make_request()
    req.state.draft = Draft((20, 21), num_client=2)
    (r,) = server.round(req)
    assert r.draft.num_client == 2 and r.draft.written_by[0][0] == "copy"
    report = req.state.report
    assert sum(report.drafters.kept.values()) == report.counters.kept_tokens - 2


def test_report_and_server_name_drafters_and_judge():
    """Red if a report, or the server's sums, do not say who drafted and judged."""
    report = RequestReport("semantic", "", False, judge="yes")
    report.drafters.add_drafted([("lookup", 7)])
    found = report.as_dict([], str)
    assert found["drafted_by"] == {"lookup": 7} and found["judge"] == "yes"
    assert "judge" not in RequestReport("exact", "", False).as_dict([], str)
    telemetry = Telemetry()
    telemetry.add_request(report)
    telemetry.count("extension_errors", 1, "segmenter", "mine")
    telemetry.count("extension_errors", 1, "segmenter", "mine")
    state = telemetry.as_dict()
    assert state["drafted_by"] == {"lookup": 7} and state["kept_by"] == {}
    assert state["extension_errors"] == {"segmenter": {"mine": 2}}
