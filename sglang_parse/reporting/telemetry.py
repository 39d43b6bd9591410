"""Server-wide counters, as /server_info and /metrics show them.

The scheduler process has one `TELEMETRY`: the worker and the output streamer write to
it, and plugin/metrics_hooks.py reads it. Each finished request is counted once.
"""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from sglang_parse.reporting.report import RequestCounters, RequestReport

SCORE_BUCKETS = (0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 1.0)
#: Counters on /metrics by the name after `sglang:parse_`: text, and labels besides the
#: server's.
COUNTERS: dict[str, tuple[str, ...]] = {
    "requests": ("Finished requests by mode.", "mode"),
    "fallbacks": ("Finished requests not served in the mode asked for.",),
    "segments": ("Judged segments by outcome (kept, rejected).", "outcome"),
    "stage_seconds": ("Seconds of rounds by stage.", "stage"),
    "pass_rows": ("Rows of passes by kind (draft, verdict, read).", "kind"),
    "drafted": ("Tokens drafted, by drafter.", "drafter"),
    "kept": ("Drafted tokens in outputs, by drafter.", "drafter"),
    "extension_errors": ("Errors of drafters, segmenters, judges.", "kind", "name"),
    "draft_streams": ("Streams of the draft server by event.", "event"),
    "target_passes": ("Forwards of the target after the prefill.",),
    "client_tokens": ("Tokens of clients' texts tried as drafts.",),
    "probe_segments": ("Judged segments whose verdict a probe gave.",),
    "judged_tokens": ("Draft tokens under some verdict.",),
    "kept_tokens": ("Draft and client tokens in outputs.",),
    "matched_tokens": ("Kept tokens that agreed token by token.",),
    "written_tokens": ("Output tokens written by the target itself.",),
}


@dataclass
class Telemetry:
    """Sums over the finished requests and the rounds of a server."""

    #: The server's ParseConfig as a dictionary, None before the worker has started.
    settings: dict[str, Any] | None = None
    #: By name, and by the values of its labels. Names are those of COUNTERS and the
    #: fields of RequestCounters.
    counts: dict[str, Counter[tuple[str, ...]]] = field(
        default_factory=lambda: defaultdict(Counter)
    )
    #: Finished requests by the reason that kept them from being served as asked.
    fallbacks: Counter[str] = field(default_factory=Counter)
    #: Verdicts by upper bound of their score.
    scores: Counter[float] = field(default_factory=Counter)
    #: The guard of a probe (`probe.probe_guard.ProbeGuard`), None without one.
    guard: Any = None
    #: Counts the requests that the server keeps a state of, None before the worker has
    #: started.
    held: Callable[[], int] | None = None
    #: The fast paths of the target and the drafters (`sgl.fast_paths.FastPaths`).
    paths: Any = None
    #: The same on /metrics, None without --enable-metrics and on other ranks.
    prometheus: Prometheus | None = None

    def count(self, name: str, num: float = 1, *labels: str) -> None:
        self.counts[name][labels] += num  # type: ignore[assignment]
        if self.prometheus:
            self.prometheus.count(name, num, *labels)

    def show(self, paths: Any) -> None:
        """Show fast paths, and whenever one is switched on or off."""
        self.paths = paths
        if self.prometheus:
            paths.on_change = self.prometheus.show_path

    def add_request(self, report: RequestReport) -> None:
        """Count a finished request."""
        counters = report.counters
        self.count("requests", 1, report.mode)
        if report.fallback:
            self.fallbacks[report.fallback] += 1
            self.count("fallbacks")
        rejected = counters.judged_segments - counters.kept_segments
        self.count("segments", counters.kept_segments, "kept")
        self.count("segments", rejected, "rejected")
        for name, num in dataclasses.asdict(counters).items():
            self.count(name, num)
        for drafter, num in report.drafters.drafted.items():
            self.count("drafted", num, drafter)
        for drafter, num in report.drafters.kept.items():
            self.count("kept", num, drafter)
        for score in report.scores:
            self.scores[score_bucket(score)] += 1
            if self.prometheus:
                self.prometheus.scores.observe(score)

    def as_dict(self) -> dict[str, Any]:
        """What /server_info shows."""
        sums = [f.name for f in dataclasses.fields(RequestCounters)]
        errors: dict[str, dict[str, int]] = {}
        for (kind, name), num in self.counts["extension_errors"].items():
            errors.setdefault(kind, {})[name] = num
        seconds = self._by_label("stage_seconds")
        return {
            "settings": self.settings,
            "requests": self._by_label("requests"),
            "held_requests": self.held() if self.held else 0,
            "fallbacks": dict(self.fallbacks),
            **{name: self.counts[name][()] for name in sums},
            "drafted_by": self._by_label("drafted"),
            "kept_by": self._by_label("kept"),
            "verdict_scores": {str(b): self.scores[b] for b in SCORE_BUCKETS},
            "extension_errors": errors,
            "draft_streams": self._by_label("draft_streams"),
            "probe": self.guard.as_dict() if self.guard else None,
            "stage_seconds": {k: round(v, 3) for k, v in seconds.items()},
            "pass_rows": self._by_label("pass_rows"),
            "paths": self.paths.as_dict() if self.paths else {},
        }

    def _by_label(self, name: str) -> dict[str, int]:
        return {label: num for (label,), num in self.counts[name].items() if num}


def score_bucket(score: float) -> float:
    """The first of SCORE_BUCKETS that is at least `score`."""
    return next((b for b in SCORE_BUCKETS if score <= b), SCORE_BUCKETS[-1])


TELEMETRY = Telemetry()


class Prometheus:
    """The same on /metrics; names begin as SGLang's do."""

    def __init__(
        self, model_name: str, dp_rank: int | None = None, registry: Any = None
    ) -> None:
        """dp_rank: a label where there are replicas, as in SGLang's own metrics.
        registry: of prometheus_client, its own for None."""
        # Imported after SGLang has set PROMETHEUS_MULTIPROC_DIR.
        import prometheus_client as client

        registry = registry or client.REGISTRY
        labels = {"model_name": model_name}
        if dp_rank is not None:
            labels["dp_rank"] = str(dp_rank)
        self.labels = list(labels.values())
        self.counters: dict[str, Any] = {}
        for name, (text, *more) in COUNTERS.items():
            made = client.Counter(
                f"sglang:parse_{name}", text, [*labels, *more], registry=registry
            )
            if not more:
                made.labels(*self.labels)  # shown at 0 from the start
            self.counters[name] = made
        self.path = client.Gauge(
            "sglang:parse_path_on",
            "1 for a fast path in use, 0 for one that is off or absent.",
            [*labels, "path"],
            multiprocess_mode="mostrecent",
            registry=registry,
        )
        self.scores = client.Histogram(
            "sglang:parse_verdict_score",
            "P(yes) / (P(yes) + P(no)) of judged prefixes.",
            list(labels),
            buckets=SCORE_BUCKETS,
            registry=registry,
        ).labels(*self.labels)

    def count(self, name: str, num: float, *labels: str) -> None:
        """Count what has a metric; /server_info alone shows the others."""
        if counter := self.counters.get(name):
            counter.labels(*self.labels, *labels).inc(num)

    def show_path(self, name: str, is_on: bool) -> None:
        self.path.labels(*self.labels, name).set(float(is_on))


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
