"""Valid requests in all modes for a long time: nothing leaks, slows down or changes."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from benchmarks.reliability.canary import Canaries
from benchmarks.reliability.cases import Case, draw
from benchmarks.reliability.fuzz import Report, at_rest, drive
from benchmarks.reliability.resources import Resources, growth, resources_of

# What grows while a server is new is no leak.
WARM_UP_SHARE = 1 / 6
MEMORY_SHARE = 0.02
# Answers in the last twelfth, against the first two.
THROUGHPUT_SHARE = 0.97
NUM_SLICES = 12
ABORT_SHARE = 0.2
# Of the requests, those whose answers are known, and how many differ from each other.
KNOWN_SHARE = 0.25
NUM_KNOWN = 40


@dataclass
class Slice:
    """One part of the run."""

    num_answers: int
    seconds: float
    #: What the server holds at its end.
    held: Resources | None
    #: Seconds of all processors that the server took, None where it is not seen.
    cpu_s: float | None = None

    @property
    def rate(self) -> float:
        """Answers a second."""
        return self.num_answers / self.seconds

    @property
    def cpu_rate(self) -> float | None:
        """Answers a second of the server's own time, which other programs of the
        machine hardly change."""
        return self.num_answers / self.cpu_s if self.cpu_s else None

    def line(self) -> str:
        """For people."""
        told = f"{self.num_answers} answers, {self.rate:.2f} a second"
        if self.cpu_rate:
            told += f", {self.cpu_rate:.2f} a CPU-second"
        if self.held:
            told += f"; {self.held.memory / 2**20:.0f} MiB, "
            told += f"{self.held.threads} threads, {self.held.files} files"
        return told


def soak(
    url: str,
    *,
    seconds: float,
    seed: int,
    concurrency: int,
    pid: int | None,
    target_url: str = "",
    on_slice: Callable[[Slice], None] = lambda part: None,
) -> tuple[Report, list[Slice]]:
    """One seeded run.

    pid: of the server, None where its resources are not seen. on_slice: told of each
    part as it ends.
    """
    report = Report()
    canaries = Canaries(url, target_url, NUM_KNOWN)
    slices: list[Slice] = []
    held = resources_of(pid) if pid else None
    for number in range(NUM_SLICES):
        cases = _cases(random.Random(_seed_of(number, seed)), canaries)
        started, answered, before = time.monotonic(), report.statuses[200], held
        drive(url, cases, seconds / NUM_SLICES, concurrency, report, lambda: None)
        took = time.monotonic() - started
        held = resources_of(pid) if pid else None
        cpu_s = held.cpu_s - before.cpu_s if held and before else None
        slices.append(Slice(report.statuses[200] - answered, took, held, cpu_s))
        report.findings.extend(canaries.wrong())
        on_slice(slices[-1])
    report.findings.extend(at_rest(url, canaries))
    report.findings.extend(drift(slices))
    return report, slices


def _seed_of(number: int, seed: int) -> str:
    """The parts that are compared send the same requests, the others their own."""
    is_compared = number < 2 or number == NUM_SLICES - 1
    return f"{seed}" if is_compared else f"{seed}, part {number}"


def _cases(rng: random.Random, canaries: Canaries) -> Iterator[Case]:
    """Valid requests without an end; every fifth client leaves."""
    while True:
        is_known = rng.random() < KNOWN_SHARE
        case = canaries.case(rng) if is_known else draw(rng, hostile_share=0.0)
        leaves = rng.uniform(0.01, 1.0) if rng.random() < ABORT_SHARE else None
        yield replace(case, leaves_after=leaves)


def drift(slices: list[Slice]) -> list[str]:
    """What has changed between the first slices and the last one.

    Throughput counts as lower where answers a second and answers a second of the
    server's own processor time are both lower: a busy machine lowers the first alone.
    """
    settled, last = slices[max(1, round(len(slices) * WARM_UP_SHARE)) - 1], slices[-1]
    found = []
    first = max(slices[:2], key=lambda part: part.rate)
    least = first.rate * THROUGHPUT_SHARE
    cpu_rates = [part.cpu_rate for part in slices[:2] if part.cpu_rate]
    is_slower_itself = not (cpu_rates and last.cpu_rate) or (
        last.cpu_rate < max(cpu_rates) * THROUGHPUT_SHARE
    )
    if last.rate < least and is_slower_itself:
        found.append(
            f"{last.rate:.2f} answers a second at the end, {first.rate:.2f} at the "
            f"beginning; expected {THROUGHPUT_SHARE:.0%} of it or more"
        )
    if settled.held and last.held:
        found.extend(growth(settled.held, last.held, MEMORY_SHARE))
    return found
