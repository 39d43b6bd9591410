"""Server-wide counters."""

import pytest
from prometheus_client import CollectorRegistry

from sglang_parse.reporting.report import RequestReport, RoundRecord
from sglang_parse.reporting.telemetry import (
    SCORE_BUCKETS,
    Prometheus,
    Telemetry,
    score_bucket,
)


def finished(mode: str = "semantic", fallback: str = "") -> RequestReport:
    report = RequestReport(mode, fallback, want_segments=False)
    report.record(
        RoundRecord(
            output_len=1,
            accept_tokens=[1, 2, 9],
            draft_tokens=[1, 2, 3, 4],
            drafted_by=[("model", 4)],
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
    for rows, seconds in ((30, 2.0), (12, 0.5)):
        total.count("pass_rows", rows, "draft")
        total.count("stage_seconds", seconds, "verify")
    for event in ("begun", "begun", "failed"):
        total.count("draft_streams", 1, event)
    assert total.as_dict()["held_requests"] == 0
    total.held = lambda: 3
    result = total.as_dict()
    assert result["held_requests"] == 3
    assert result["requests"] == {"semantic": 1, "exact": 1}
    assert result["fallbacks"] == {"logprobs": 1}
    assert result["kept_tokens"] == 4 and result["written_tokens"] == 4
    assert result["verdict_scores"]["0.05"] == result["verdict_scores"]["0.99"] == 2
    assert sum(result["verdict_scores"].values()) == 4
    assert result["stage_seconds"]["verify"] == 2.5
    assert result["pass_rows"] == {"draft": 42}
    assert result["draft_streams"] == {"begun": 2, "failed": 1}


@pytest.mark.parametrize("score", [0.0, 0.01, 0.011, 0.5, 0.999, 1.0])
def test_score_buckets_are_upper_bounds(score):
    """Red if a score counts under a bound that it exceeds."""
    assert score_bucket(score) == min(b for b in SCORE_BUCKETS if b >= score)


def test_metrics_of_a_replica_have_its_rank():
    """Red if replicas of one server cannot be told apart on /metrics, a count is
    missing there, or a metric is not shown before the first request."""
    registry = CollectorRegistry()
    total = Telemetry(prometheus=Prometheus("m", 1, registry))
    labels = {"model_name": "m", "dp_rank": "1"}

    def value(name: str, /, **more: str) -> float | None:
        return registry.get_sample_value(f"sglang:parse_{name}", {**labels, **more})

    assert value("fallbacks_total") == value("kept_tokens_total") == 0
    total.add_request(finished())
    total.add_request(finished("exact", "logprobs"))
    total.count("extension_errors", 1, "judge", "mine")
    total.count("stage_seconds", 1.5, "draft")
    assert value("requests_total", mode="exact") == value("fallbacks_total") == 1
    assert value("kept_tokens_total") == 4
    assert value("drafted_total", drafter="model") == 8
    assert value("segments_total", outcome="rejected") == 2
    assert value("extension_errors_total", kind="judge", name="mine") == 1
    assert value("stage_seconds_total", stage="draft") == 1.5
    assert value("verdict_score_bucket", le="0.05") == 2
