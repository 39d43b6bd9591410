"""Valid requests in all modes for a long time: nothing leaks, slows down or changes."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass

from benchmarks.reliability.canary import Canaries
from benchmarks.reliability.cases import Case, draw
from benchmarks.reliability.fuzz import Report, at_rest, drive
from benchmarks.reliability.resources import Resources, growth, resources_of

# What grows while a server is new is no leak.
WARM_UP_SHARE = 1 / 6
MEMORY_SHARE = 0.02
# Answers a second in the last twelfth, against the first one after the warm-up.
THROUGHPUT_SHARE = 0.97
NUM_SLICES = 12
ABORT_SHARE = 0.2


@dataclass
class Slice:
    """One part of the run."""

    num_answers: int
    seconds: float
    held: Resources | None

    @property
    def rate(self) -> float:
        return self.num_answers / self.seconds


def soak(
    url: str,
    *,
    seconds: float,
    seed: int,
    concurrency: int,
    pid: int | None,
    target_url: str = "",
) -> tuple[Report, list[Slice]]:
    """One seeded run. pid: of the server, None where its resources are not seen."""
    rng = random.Random(seed)
    report = Report()
    canaries = Canaries(url, target_url)
    slices: list[Slice] = []
    cases = iter(lambda: _case(rng), None)
    for _ in range(NUM_SLICES):
        started, before = time.monotonic(), report.statuses[200]
        each = seconds / NUM_SLICES
        drive(url, cases, each, concurrency, report, lambda: None)
        took = time.monotonic() - started
        held = resources_of(pid) if pid else None
        slices.append(Slice(report.statuses[200] - before, took, held))
        report.findings.extend(canaries.wrong())
    report.findings.extend(at_rest(url, canaries))
    report.findings.extend(drift(slices))
    return report, slices


def _case(rng: random.Random) -> Case:
    """A valid request; every fifth client leaves."""
    case = draw(rng, hostile_share=0.0)
    leaves = rng.uniform(0.01, 1.0) if rng.random() < ABORT_SHARE else None
    return Case(case.path, case.body, True, leaves)


def drift(slices: list[Slice]) -> list[str]:
    """What has changed between the slices after the warm-up and the last one."""
    first, last = slices[max(1, round(len(slices) * WARM_UP_SHARE)) - 1], slices[-1]
    found = []
    if last.rate < first.rate * THROUGHPUT_SHARE:
        found.append(
            f"{last.rate:.2f} answers a second at the end, {first.rate:.2f} at the "
            f"beginning; expected {THROUGHPUT_SHARE:.0%} of it or more"
        )
    if first.held and last.held:
        found.extend(growth(first.held, last.held, MEMORY_SHARE))
    return found
