"""Server-wide counters, as /server_info and /metrics show them.

The scheduler process has one `TELEMETRY`: the worker and the output streamer write to
it, and integration/metrics_hooks.py reads it. Each finished request is counted once.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from sglang_parse.reporting.drafters import DrafterCounters
from sglang_parse.reporting.report import RequestCounters, RequestReport

SCORE_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)


class GuardState(Protocol):
    """What a probe's guard tells of itself."""

    def as_dict(self) -> dict[str, Any]: ...


@dataclass
class Telemetry:
    """Sums over the finished requests and the rounds of a server."""

    #: The server's ParseConfig as a dictionary, None before the worker has started.
    settings: dict[str, Any] | None = None
    #: Finished requests by mode.
    requests: Counter[str] = field(default_factory=Counter)
    #: Finished requests by the reason that kept them from being served as asked.
    fallbacks: Counter[str] = field(default_factory=Counter)
    #: Sums of the requests' counters.
    counters: RequestCounters = field(default_factory=RequestCounters)
    #: The same by drafter.
    drafters: DrafterCounters = field(default_factory=DrafterCounters)
    #: Verdicts by upper bound of their score (SCORE_BUCKETS).
    score_counts: list[int] = field(default_factory=lambda: [0] * len(SCORE_BUCKETS))
    #: Seconds of rounds by stage: draft, verify, decide, plain.
    stage_seconds: Counter[str] = field(default_factory=Counter)
    #: Rows of judged passes: `draft` with the bonus tokens, and `verdict` of what is
    #: asked behind prefixes.
    pass_rows: Counter[str] = field(default_factory=Counter)
    #: Errors that drafters, segmenters and judges raised, by kind and name.
    extension_errors: Counter[tuple[str, str]] = field(default_factory=Counter)
    #: Streams of the draft server by event: begun, failed, left_alone.
    draft_streams: Counter[str] = field(default_factory=Counter)
    #: The guard of a probe (`judging.probe_guard.ProbeGuard`), None without one.
    guard: GuardState | None = None
    #: Counts the requests that the server keeps a state of, None before the worker has
    #: started.
    held: Callable[[], int] | None = None
    #: The same on /metrics, None without --enable-metrics and on other ranks.
    prometheus: Prometheus | None = None

    def add_request(self, report: RequestReport) -> None:
        """Count a finished request."""
        self.requests[report.mode] += 1
        if report.fallback:
            self.fallbacks[report.fallback] += 1
        self.counters += report.counters
        self.drafters.add(report.drafters)
        for score in report.scores:
            self.score_counts[score_bucket(score)] += 1
        if self.prometheus:
            self.prometheus.add_request(report)
            if self.guard:
                self.prometheus.add_guard(self.guard.as_dict())

    def add_extension_error(self, kind: str, name: str) -> None:
        """Count an error that a drafter, a segmenter or a judge raised."""
        self.extension_errors[kind, name] += 1
        if self.prometheus:
            self.prometheus.add_extension_error(kind, name)

    def add_draft_stream(self, event: str) -> None:
        """Count what became of a stream of the draft server."""
        self.draft_streams[event] += 1
        if self.prometheus:
            self.prometheus.add_draft_stream(event)

    def add_seconds(self, **stages: float) -> None:
        """Count a round's time by stage."""
        self.stage_seconds.update(stages)
        if self.prometheus:
            self.prometheus.add_seconds(stages)

    def add_rows(self, **rows: int) -> None:
        """Count the rows of a judged pass: draft and verdict."""
        self.pass_rows.update(rows)
        if self.prometheus:
            self.prometheus.add_rows(rows)

    def as_dict(self) -> dict[str, Any]:
        return {
            "settings": self.settings,
            "requests": dict(self.requests),
            "held_requests": self.held() if self.held else 0,
            "fallbacks": dict(self.fallbacks),
            **self.counters.as_dict(),
            **self.drafters.as_dict(),
            "verdict_scores": dict(
                zip(map(str, SCORE_BUCKETS), self.score_counts, strict=True)
            ),
            "extension_errors": self._errors_by_kind(),
            "draft_streams": dict(self.draft_streams),
            "probe": self.guard.as_dict() if self.guard else None,
            "stage_seconds": {k: round(v, 3) for k, v in self.stage_seconds.items()},
            "pass_rows": dict(self.pass_rows),
        }

    def _errors_by_kind(self) -> dict[str, dict[str, int]]:
        """Kind -> name -> number of errors."""
        result: dict[str, dict[str, int]] = {}
        for (kind, name), num in self.extension_errors.items():
            result.setdefault(kind, {})[name] = num
        return result


def score_bucket(score: float) -> int:
    """Index of the first of SCORE_BUCKETS that is at least `score`."""
    return min(bisect.bisect_left(SCORE_BUCKETS, score), len(SCORE_BUCKETS) - 1)


TELEMETRY = Telemetry()


class Prometheus:
    """The same on /metrics; names begin as SGLang's do."""

    def __init__(
        self, model_name: str, dp_rank: int | None = None, registry: Any = None
    ) -> None:
        """dp_rank: of this replica, a label of every metric; None where there is one
        replica, as in SGLang's own metrics. registry: of prometheus_client, its own
        for None."""
        # After SGLang has set PROMETHEUS_MULTIPROC_DIR.
        from prometheus_client import REGISTRY, Gauge, Histogram
        from prometheus_client import Counter as PromCounter

        registry = registry or REGISTRY

        labels = {"model_name": model_name}
        if dp_rank is not None:
            labels["dp_rank"] = str(dp_rank)

        def counter(name: str, text: str, *more: str) -> Any:
            names = [*labels, *more]
            made = PromCounter(f"sglang:parse_{name}", text, names, registry=registry)
            return made if more else made.labels(**labels)

        self.labels = labels
        self.requests = counter("requests", "Finished requests by mode.", "mode")
        self.fallbacks = counter(
            "fallbacks", "Finished requests not served in the mode asked for."
        )
        self.segments = counter(
            "segments", "Judged segments by outcome (kept, rejected).", "outcome"
        )
        self.seconds = counter(
            "stage_seconds",
            "Seconds of rounds by stage (draft, verify, decide, plain, follow).",
            "stage",
        )
        self.rows = counter(
            "pass_rows", "Rows of judged passes by kind (draft, verdict).", "kind"
        )
        self.drafted = counter("drafted", "Tokens drafted, by drafter.", "drafter")
        self.kept = counter("kept", "Drafted tokens in outputs, by drafter.", "drafter")
        self.extension_errors = counter(
            "extension_errors",
            "Errors that a drafter, segmenter or judge raised.",
            *("kind", "name"),
        )
        self.draft_streams = counter(
            "draft_streams",
            "Streams of the draft server by event (begun, failed, left_alone).",
            "event",
        )
        texts = {
            "target_passes": "Forwards of the target after the prefill.",
            "draft_tokens": "Tokens drafted by the draft model.",
            "eagle_draft_tokens": "Tokens drafted by the target's head.",
            "eagle_kept_tokens": "Tokens of the target's head in outputs.",
            "client_tokens": "Tokens of clients' texts tried as drafts.",
            "probe_segments": "Judged segments whose verdict a probe gave.",
            "judged_tokens": "Draft tokens under some verdict.",
            "kept_tokens": "Draft and client tokens in outputs.",
            "matched_tokens": "Kept tokens that agreed token by token.",
            "written_tokens": "Output tokens written by the target itself.",
        }
        self.tokens = {name: counter(name, text) for name, text in texts.items()}
        self.guard = {
            name: Gauge(
                f"sglang:parse_probe_{name}",
                text,
                list(labels),
                multiprocess_mode="mostrecent",
                registry=registry,
            ).labels(**labels)
            for name, text in {
                "in_use": "1 while the probe gives verdicts, 0 while it is held back.",
                "agreement": "Share of compared verdicts on which both agree.",
                "agreement_low": "Lower end of its 95% interval.",
                "agreement_high": "Upper end of its 95% interval.",
            }.items()
        }
        self.scores = Histogram(
            "sglang:parse_verdict_score",
            "P(yes) / (P(yes) + P(no)) of judged prefixes.",
            list(labels),
            buckets=SCORE_BUCKETS,
            registry=registry,
        ).labels(**labels)

    def add_request(self, report: RequestReport) -> None:
        counts = report.counters
        self.requests.labels(**self.labels, mode=report.mode).inc()
        self.fallbacks.inc(bool(report.fallback))
        rejected = counts.judged_segments - counts.kept_segments
        for outcome, num in (("kept", counts.kept_segments), ("rejected", rejected)):
            self.segments.labels(**self.labels, outcome=outcome).inc(num)
        for name, one in self.tokens.items():
            one.inc(getattr(counts, name))
        for by_name, one in (
            (report.drafters.drafted, self.drafted),
            (report.drafters.kept, self.kept),
        ):
            for name, num in by_name.items():
                one.labels(**self.labels, drafter=name).inc(num)
        for score in report.scores:
            self.scores.observe(score)

    def add_guard(self, state: dict[str, Any]) -> None:
        """Show how a probe agrees with the question."""
        for name, one in self.guard.items():
            if (value := state[name]) is not None:
                one.set(float(value))

    def add_extension_error(self, kind: str, name: str) -> None:
        self.extension_errors.labels(**self.labels, kind=kind, name=name).inc()

    def add_draft_stream(self, event: str) -> None:
        self.draft_streams.labels(**self.labels, event=event).inc()

    def add_seconds(self, stages: dict[str, float]) -> None:
        for stage, seconds in stages.items():
            self.seconds.labels(**self.labels, stage=stage).inc(seconds)

    def add_rows(self, rows: dict[str, int]) -> None:
        for kind, num in rows.items():
            self.rows.labels(**self.labels, kind=kind).inc(num)


@functools.cache
def prometheus_of(model_name: str, dp_rank: int | None) -> Prometheus:
    """One set of metrics a process: their names cannot be registered twice."""
    return Prometheus(model_name, dp_rank)


def start(
    config: Any, server_args: Any, *, is_first_rank: bool, dp_rank: int | None = None
) -> Telemetry:
    """The worker's telemetry, with this server's settings. dp_rank: of its replica."""
    TELEMETRY.settings = dataclasses.asdict(config)
    if server_args.enable_metrics and is_first_rank:
        name = server_args.served_model_name or server_args.model_path
        TELEMETRY.prometheus = prometheus_of(name, dp_rank)
    return TELEMETRY
