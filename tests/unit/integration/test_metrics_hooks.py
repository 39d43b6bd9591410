"""SGLang's figures, corrected for drafts of different lengths."""

from types import SimpleNamespace

import pytest

from sglang_parse.integration import metrics_hooks


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
    monkeypatch.setattr(metrics_hooks, "serves_parse", lambda: True)


def test_logged_accept_rate_is_kept_over_drafted(serving):
    """Red if the log line shows kept drafts over rounds again."""
    one = reporter()
    metrics_hooks.correct_decode_stats(one)
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
    metrics_hooks.correct_decode_stats(one)
    assert one.spec_num_correct_drafts == 30


@pytest.mark.parametrize(("proposed", "rate"), [(40, 0.75), (0, 0.0)])
def test_accept_rate_of_a_request_is_kept_over_drafted(serving, proposed, rate):
    """Red if a client reads a rate of rounds times a fixed length, or a request that
    nobody drafted for divides by zero."""
    meta_info = {"spec_num_proposed_drafts": 4, "spec_num_correct_drafts": 30}
    received = SimpleNamespace(spec_num_cap_tokens=[9, proposed])
    metrics_hooks.correct_accept_rate(None, None, meta_info, received, 1)
    assert meta_info["spec_num_proposed_drafts"] == proposed
    assert meta_info["spec_accept_rate"] == rate


def test_server_info_has_our_counters(serving):
    """Red if /server_info of a PARSE server loses its part."""
    result = SimpleNamespace(internal_state={"other": 1})
    state = metrics_hooks.add_internal_state(result).internal_state
    assert state["other"] == 1 and "kept_tokens" in state["parse"]


def test_other_algorithms_are_left_alone():
    """Red if our hooks change the figures of a server without PARSE."""
    one = reporter()
    metrics_hooks.correct_decode_stats(one)
    assert one.spec_num_correct_drafts == 30
    meta_info = {"spec_num_proposed_drafts": 4, "spec_num_correct_drafts": 3}
    metrics_hooks.correct_accept_rate(None, None, meta_info, None, 0)
    assert meta_info["spec_num_proposed_drafts"] == 4
    result = SimpleNamespace(internal_state={})
    assert metrics_hooks.add_internal_state(result).internal_state == {}
