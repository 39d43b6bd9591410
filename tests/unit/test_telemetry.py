"""Server-wide counters."""

from types import SimpleNamespace

import pytest

from sglang_parse import telemetry
from sglang_parse.metrics import RequestReport, RoundRecord
from sglang_parse.telemetry import SCORE_BUCKETS, Telemetry, score_bucket


def finished(mode: str = "semantic", fallback: str = "") -> RequestReport:
    report = RequestReport(mode, fallback, want_segments=False)
    report.record(
        RoundRecord(
            output_len=1,
            accept_tokens=[1, 2, 9],
            draft_tokens=[1, 2, 3, 4],
            num_new=4,
            boundaries=[2, 4],
            scores=[0.97, 0.02],
            num_judged=2,
        )
    )
    return report


def test_finished_requests_add_up():
    """Red if a counter is dropped or counted twice."""
    total = Telemetry()
    total.add_request(finished())
    total.add_request(finished("exact", "logprobs"))
    total.add_seconds(draft=1.0, verify=2.0, decide=0.5)
    total.add_seconds(plain=0.25)
    result = total.as_dict()
    assert result["requests"] == {"semantic": 1, "exact": 1}
    assert result["fallbacks"] == {"logprobs": 1}
    assert result["kept_tokens"] == 4 and result["written_tokens"] == 4
    assert result["verdict_scores"]["0.05"] == result["verdict_scores"]["0.99"] == 2
    assert sum(result["verdict_scores"].values()) == 4
    assert result["stage_seconds"]["verify"] == 2.0


@pytest.mark.parametrize("score", [0.0, 0.01, 0.011, 0.5, 0.999, 1.0])
def test_score_buckets_are_upper_bounds(score):
    """Red if a score counts under a bound that it exceeds."""
    k = score_bucket(score)
    assert score <= SCORE_BUCKETS[k]
    assert k == 0 or score > SCORE_BUCKETS[k - 1]


def reporter(**values):
    defaults = {
        "spec_num_cap_tokens": 40,
        "spec_num_forward_ct": 4,
        "spec_num_correct_drafts": 30,
        "is_stats_logging_rank": True,
        "current_scheduler_metrics_enabled": False,
        "forward_ct_decode": 80,
        "decode_log_interval": 40,
    }
    return SimpleNamespace(**defaults | values)


@pytest.fixture
def serving(monkeypatch):
    monkeypatch.setattr(telemetry, "TELEMETRY", Telemetry(settings={}))


def test_logged_accept_rate_is_kept_over_drafted(serving):
    """Red if the log line shows kept drafts over rounds again."""
    one = reporter()
    telemetry.correct_decode_stats(one)
    # What SGLang divides: kept / (rounds * (num_draft_tokens - 1)), the latter 1.
    assert one.spec_num_correct_drafts / one.spec_num_forward_ct == 30 / 40


@pytest.mark.parametrize(
    "change",
    [
        {"forward_ct_decode": 81},
        {"is_stats_logging_rank": False},
        {"spec_num_cap_tokens": 0},
    ],
    ids=str,
)
def test_between_reports_nothing_is_rescaled(serving, change):
    """Red if the count is rescaled more than once an interval."""
    one = reporter(**change)
    telemetry.correct_decode_stats(one)
    assert one.spec_num_correct_drafts == 30


def test_other_algorithms_are_left_alone():
    """Red if our hook changes the figures of a server without PARSE."""
    one = reporter()
    telemetry.correct_decode_stats(one)
    assert one.spec_num_correct_drafts == 30
