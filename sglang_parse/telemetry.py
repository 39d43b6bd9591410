"""Server-wide counters: /server_info, /metrics, and SGLang's own acceptance figures.

The scheduler process has one `TELEMETRY`; the worker and the output streamer write to
it, the hooks below read it. Each finished request is counted once.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from sglang_parse.metrics import RequestCounters, RequestReport

SCORE_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


@dataclass
class Telemetry:
    """requests: finished ones by mode. counters: their sums. score_counts: verdicts by
    upper bound (SCORE_BUCKETS). stage_seconds: draft, verify, decide, plain. settings:
    of the server, None where it does not serve with PARSE."""

    settings: dict[str, Any] | None = None
    requests: Counter[str] = field(default_factory=Counter)
    fallbacks: Counter[str] = field(default_factory=Counter)
    counters: RequestCounters = field(default_factory=RequestCounters)
    score_counts: list[int] = field(default_factory=lambda: [0] * len(SCORE_BUCKETS))
    stage_seconds: Counter[str] = field(default_factory=Counter)
    prometheus: Prometheus | None = None

    def add_request(self, report: RequestReport) -> None:
        """Count a finished request."""
        self.requests[report.mode] += 1
        if report.fallback:
            self.fallbacks[report.fallback] += 1
        self.counters += report.counters
        for score in report.scores:
            self.score_counts[score_bucket(score)] += 1
        if self.prometheus:
            self.prometheus.add_request(report)

    def add_seconds(self, **stages: float) -> None:
        """Count a round's time by stage."""
        self.stage_seconds.update(stages)
        if self.prometheus:
            self.prometheus.add_seconds(stages)

    def as_dict(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "requests": dict(self.requests),
            "fallbacks": dict(self.fallbacks),
            **self.counters.as_dict(),
            "verdict_scores": dict(
                zip(map(str, SCORE_BUCKETS), self.score_counts, strict=True)
            ),
            "stage_seconds": {k: round(v, 3) for k, v in self.stage_seconds.items()},
        }


def score_bucket(score: float) -> int:
    """Index of the first of SCORE_BUCKETS that is at least `score`."""
    return min(bisect.bisect_left(SCORE_BUCKETS, score), len(SCORE_BUCKETS) - 1)


TELEMETRY = Telemetry()


class Prometheus:
    """The same on /metrics; names begin as SGLang's do."""

    def __init__(self, model_name: str) -> None:
        # After SGLang has set PROMETHEUS_MULTIPROC_DIR.
        from prometheus_client import Counter as PromCounter
        from prometheus_client import Histogram

        labels = {"model_name": model_name}

        def counter(name: str, text: str, *more: str) -> Any:
            made = PromCounter(f"sglang:parse_{name}", text, [*labels, *more])
            return made if more else made.labels(**labels)

        self.labels = labels
        self.requests = counter("requests", "Finished requests by mode.", "mode")
        self.segments = counter(
            "segments", "Judged segments by outcome (kept, rejected).", "outcome"
        )
        self.seconds = counter(
            "stage_seconds",
            "Seconds of rounds by stage (draft, verify, decide, plain).",
            "stage",
        )
        texts = {
            "target_passes": "Forwards of the target after the prefill.",
            "draft_tokens": "Tokens drafted by the draft model.",
            "eagle_draft_tokens": "Tokens drafted by the EAGLE-3 head.",
            "eagle_kept_tokens": "Tokens of the EAGLE-3 head in outputs.",
            "client_tokens": "Tokens of clients' texts tried as drafts.",
            "judged_tokens": "Draft tokens under some verdict.",
            "kept_tokens": "Draft and client tokens in outputs.",
            "matched_tokens": "Kept tokens that agreed token by token.",
            "written_tokens": "Output tokens written by the target itself.",
        }
        self.tokens = {name: counter(name, text) for name, text in texts.items()}
        self.scores = Histogram(
            "sglang:parse_verdict_score",
            "P(yes) / (P(yes) + P(no)) of judged prefixes.",
            list(labels),
            buckets=SCORE_BUCKETS,
        ).labels(**labels)

    def add_request(self, report: RequestReport) -> None:
        counts = report.counters
        self.requests.labels(**self.labels, mode=report.mode).inc()
        rejected = counts.judged_segments - counts.kept_segments
        for outcome, num in (("kept", counts.kept_segments), ("rejected", rejected)):
            self.segments.labels(**self.labels, outcome=outcome).inc(num)
        for name, one in self.tokens.items():
            one.inc(getattr(counts, name))
        for score in report.scores:
            self.scores.observe(score)

    def add_seconds(self, stages: dict[str, float]) -> None:
        for stage, seconds in stages.items():
            self.seconds.labels(**self.labels, stage=stage).inc(seconds)


@functools.cache
def prometheus_of(model_name: str) -> Prometheus:
    """One set of metrics a process: their names cannot be registered twice."""
    return Prometheus(model_name)


def start(config: Any, server_args: Any, *, is_first_rank: bool) -> Telemetry:
    """The worker's telemetry, with this server's settings."""
    TELEMETRY.settings = dataclasses.asdict(config)
    if server_args.enable_metrics and is_first_rank:
        name = server_args.served_model_name or server_args.model_path
        TELEMETRY.prometheus = prometheus_of(name)
    return TELEMETRY


def add_internal_state(result: Any, *_: Any, **__: Any) -> Any:
    """AFTER hook on Scheduler.get_internal_state: /server_info shows our part."""
    if TELEMETRY.settings is not None:
        result.internal_state["parse"] = TELEMETRY.as_dict()
    return result


def correct_accept_rate(
    result: Any, manager: Any, meta_info: dict[str, Any], recv_obj: Any, i: int
) -> Any:
    """AFTER hook on TokenizerManager._calculate_spec_decoding_metrics.

    SGLang counts a fixed number of drafts a round; ours are ragged and their number
    travels as the round's cap (commit.py).
    """
    if "spec_num_proposed_drafts" not in meta_info or not _is_parse():
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
    if TELEMETRY.settings is None or not reporter.spec_num_cap_tokens:
        return
    reports = (
        reporter.is_stats_logging_rank or reporter.current_scheduler_metrics_enabled
    )
    if not reports or reporter.forward_ct_decode % reporter.decode_log_interval:
        return
    rounds = reporter.spec_num_forward_ct
    kept = reporter.spec_num_correct_drafts
    reporter.spec_num_correct_drafts = kept * rounds / reporter.spec_num_cap_tokens


def _is_parse() -> bool:
    from sglang.srt.runtime_context import get_spec

    return get_spec().speculative_algorithm == "PARSE"
