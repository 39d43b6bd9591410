"""SGLang's figures, corrected for drafts of different lengths."""

from types import SimpleNamespace

import pytest

from sglang_parse.plugin import metrics_hooks


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


def test_logged_accept_rate_is_kept_over_drafted():
    """Red if the log line shows kept drafts over rounds again."""
    one = reporter()
    metrics_hooks.correct_decode_stats(one)
    # What SGLang divides: kept / (rounds * (num_draft_tokens - 1)), the latter 1.
    assert one.spec_num_correct_drafts / one.spec_num_forward_ct == 30 / 40


def test_a_line_of_ours_stands_beside_sglangs(caplog):
    """Red if it comes at every step, or not where nothing is drafted."""
    caplog.set_level("INFO")
    for values in ({}, {"forward_ct_decode": 81}, {"spec_num_cap_tokens": 0}):
        metrics_hooks.ROUND_LOG.add_round("drafts do not pay")
        metrics_hooks.correct_decode_stats(reporter(**values))
    lines = [r.getMessage() for r in caplog.records]
    assert len(lines) == 2 and all(x.startswith("PARSE batch, ") for x in lines)
    assert "rounds not judged: 2 of 2 (drafts do not pay)" in lines[1]


@pytest.mark.parametrize(
    "change",
    [
        {"forward_ct_decode": 81},
        {"is_stats_logging_rank": False},
        {"spec_num_cap_tokens": 0},
    ],
    ids=str,
)
def test_between_reports_nothing_is_rescaled(change):
    """Red if the count is rescaled more than once an interval."""
    one = reporter(**change)
    metrics_hooks.correct_decode_stats(one)
    assert one.spec_num_correct_drafts == 30


def test_server_info_has_our_counters():
    """Red if /server_info of a PARSE server loses its part."""
    result = SimpleNamespace(internal_state={"other": 1})
    state = metrics_hooks.add_internal_state(result).internal_state
    assert state["other"] == 1 and "kept_tokens" in state["parse"]
