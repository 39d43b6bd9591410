"""SGLang's own figures of a PARSE server: its accept rates, and its /server_info."""

from __future__ import annotations

from typing import Any

from sglang_parse.integration.active import serves_parse
from sglang_parse.probe.pairs_route import add_pairs
from sglang_parse.reporting.telemetry import TELEMETRY
from sglang_parse.runtime.compat.requests import count_drafts


def add_internal_state(
    result: Any, scheduler: Any = None, recv_req: Any = None, *_: Any, **__: Any
) -> Any:
    """AFTER hook on Scheduler.get_internal_state: /server_info shows our part, and the
    endpoint of pairs gets those that it asks for."""
    if serves_parse():
        result.internal_state["parse"] = TELEMETRY.as_dict()
        add_pairs(result, recv_req)
    return result


def correct_accept_rate(
    result: Any, manager: Any, meta_info: dict[str, Any], recv_obj: Any, i: int
) -> Any:
    """AFTER hook on TokenizerManager._calculate_spec_decoding_metrics.

    SGLang counts a fixed number of drafts a round; ours are ragged and their number
    travels as the round's cap (integration/result.py).
    """
    if "spec_num_proposed_drafts" not in meta_info or not serves_parse():
        return result
    proposed = recv_obj.spec_num_cap_tokens[i]
    correct = meta_info["spec_num_correct_drafts"]
    meta_info["spec_num_proposed_drafts"] = proposed
    meta_info["spec_accept_rate"] = correct / proposed if proposed else 0.0
    return result


def correct_decode_stats(reporter: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook on SchedulerMetricsReporter.report_decode_stats.

    Once an interval it divides by rounds times a fixed draft length; the count of kept
    drafts is rescaled so that the quotient is kept drafts over drafts.
    """
    if not serves_parse() or not reporter.spec_num_cap_tokens:
        return
    reports = (
        reporter.is_stats_logging_rank or reporter.current_scheduler_metrics_enabled
    )
    if not reports or reporter.forward_ct_decode % reporter.decode_log_interval:
        return
    count_drafts(reporter)
