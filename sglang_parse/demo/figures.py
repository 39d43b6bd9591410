"""Figures of one arm of a measurement, each defined once. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

Z95 = 1.959963984540054  # two-sided 95% quantile of the normal distribution


@dataclass(frozen=True)
class RequestResult:
    """One answered request. Times in seconds from sending it.

    ttft_s: to the first output token. num_tokens: output tokens. report:
    `meta_info["parse"]` of a PARSE server, None of a plain one.
    """

    text: str
    token_ids: tuple[int, ...]
    num_tokens: int
    correct: bool
    latency_s: float
    ttft_s: float
    report: dict[str, Any] | None = None


@dataclass(frozen=True)
class ArmSummary:
    """One arm at one concurrency.

    kept_per_pass: draft tokens in the output per decode pass of the target, None
    without PARSE. passes_per_answer: decode passes of the target. ratio: output_tok_s
    over the target arm's at the same concurrency in the same run.
    """

    arm: str
    concurrency: int
    problems: int
    accuracy: float
    accuracy_low: float
    accuracy_high: float
    wall_s: float
    output_tokens: int
    output_tok_s: float
    requests_s: float
    latency_p50_s: float
    latency_p95_s: float
    ttft_p50_s: float
    ttft_p95_s: float
    kept_per_pass: float | None
    passes_per_answer: float
    ratio: float | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def target_passes(result: RequestResult) -> int:
    """Decode passes of the target; the prefill, which gives token 1, is not one."""
    if result.report is not None:
        return int(result.report["target_passes"])
    return max(0, result.num_tokens - 1)


def kept_per_pass(results: Sequence[RequestResult]) -> float | None:
    """Draft tokens kept per decode pass over all requests that carry a report."""
    reports = [r.report for r in results if r.report is not None]
    if not reports:
        return None
    num_passes = sum(r["target_passes"] for r in reports)
    kept: float = sum(r["kept_tokens"] for r in reports)
    return kept / num_passes if num_passes else 0.0


def summarise(
    arm: str,
    concurrency: int,
    results: Sequence[RequestResult],
    wall_s: float,
    baseline_tok_s: float | None = None,
) -> ArmSummary:
    """Figures of `results`, which took `wall_s` together.

    baseline_tok_s: output_tok_s of the target arm; None leaves the ratio open. Raises
    ValueError without results.
    """
    from scipy.stats import binomtest

    if not results:
        raise ValueError(f"Arm {arm!r} at concurrency {concurrency} has no results.")
    num_right = sum(r.correct for r in results)
    low, high = binomtest(num_right, len(results)).proportion_ci(method="wilson")
    output_tokens = sum(r.num_tokens for r in results)
    latencies = [r.latency_s for r in results]
    ttfts = [r.ttft_s for r in results]
    rate = output_tokens / wall_s
    return ArmSummary(
        arm=arm,
        concurrency=concurrency,
        problems=len(results),
        accuracy=num_right / len(results),
        accuracy_low=low,
        accuracy_high=high,
        wall_s=wall_s,
        output_tokens=output_tokens,
        output_tok_s=rate,
        requests_s=len(results) / wall_s,
        latency_p50_s=float(np.quantile(latencies, 0.5)),
        latency_p95_s=float(np.quantile(latencies, 0.95)),
        ttft_p50_s=float(np.quantile(ttfts, 0.5)),
        ttft_p95_s=float(np.quantile(ttfts, 0.95)),
        kept_per_pass=kept_per_pass(results),
        passes_per_answer=sum(map(target_passes, results)) / len(results),
        ratio=rate / baseline_tok_s if baseline_tok_s else None,
    )
