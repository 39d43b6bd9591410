"""What a PARSE server's scheduler reports: its logged accept rate and /server_info."""

from __future__ import annotations

import logging
from typing import Any

from sglang_parse.reporting.round_log import ROUND_LOG
from sglang_parse.reporting.telemetry import TELEMETRY
from sglang_parse.sgl.compat.request_changes import count_in_log

logger = logging.getLogger(__name__)


def add_internal_state(result: Any, *_: Any, **__: Any) -> Any:
    """AFTER hook on Scheduler.get_internal_state: /server_info shows our part."""
    result.internal_state["parse"] = TELEMETRY.as_dict()
    return result


def correct_decode_stats(reporter: Any, *_: Any, **__: Any) -> None:
    """BEFORE hook on SchedulerMetricsReporter.report_decode_stats.

    Once per interval SGLang divides by the rounds times a fixed draft length. The count
    of kept drafts is rescaled so that the quotient is kept drafts over drafts. A line
    of ours stands before SGLang's.
    """
    reports = (
        reporter.is_stats_logging_rank or reporter.current_scheduler_metrics_enabled
    )
    if not reports or reporter.forward_ct_decode % reporter.decode_log_interval:
        return
    if reporter.is_stats_logging_rank and (told := ROUND_LOG.line()):
        logger.info("PARSE batch, %s", told)
    if not reporter.spec_num_cap_tokens:
        return
    kept, proposed = reporter.spec_num_correct_drafts, reporter.spec_num_cap_tokens
    wanted = kept * reporter.spec_num_forward_ct / proposed
    count_in_log(reporter, num_drafts=wanted - kept)
