"""Hostile and valid requests for a given time: nothing may end, hang or answer 5xx."""

from __future__ import annotations

import itertools
import random
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field

from benchmarks.reliability.canary import Canaries
from benchmarks.reliability.cases import Case, draw
from benchmarks.reliability.traffic import (
    NAMES,
    NO_ANSWER,
    Outcome,
    held_requests,
    is_alive,
    send,
    used_tokens,
    wait_idle,
)

CANARY_EVERY_S = 20.0
MAX_FINDINGS = 20
# Requests whose state an idle server keeps: SGLang holds on to its last batches.
MAX_HELD = 16


@dataclass
class Report:
    """What a run has found."""

    #: One sentence each; empty where all is well.
    findings: list[str] = field(default_factory=list)
    #: Requests by HTTP status, NO_ANSWER or CLIENT_LEFT.
    statuses: Counter[int] = field(default_factory=Counter)
    #: Answers compared with the target's, token by token.
    num_compared: int = 0
    #: Seconds of the slowest answer.
    slowest_s: float = 0.0

    @property
    def num_requests(self) -> int:
        return sum(self.statuses.values())

    def note(self, outcome: Outcome) -> None:
        self.statuses[outcome.status] += 1
        self.num_compared += outcome.is_compared
        self.slowest_s = max(self.slowest_s, outcome.seconds)
        if outcome.problem:
            case = outcome.case
            self.findings.append(
                f"{outcome.problem} ({outcome.text[:200]}): {case.path} "
                f"{case.body[:1500]}"
            )

    def __iadd__(self, other: Report) -> Report:
        self.findings += other.findings
        self.statuses.update(other.statuses)
        self.num_compared += other.num_compared
        self.slowest_s = max(self.slowest_s, other.slowest_s)
        return self

    def lines(self) -> Iterator[str]:
        """For people."""
        told = ", ".join(
            f"{NAMES.get(status, status)}: {num}"
            for status, num in sorted(self.statuses.items())
        )
        yield f"{self.num_requests} requests by status ({told})"
        if self.num_compared:
            yield f"{self.num_compared} answers compared with the target's"
        yield f"slowest answer {self.slowest_s:.1f} s"
        yield from self.findings[:MAX_FINDINGS]
        yield f"{len(self.findings)} findings"


def drive(
    url: str,
    cases: Iterator[Case],
    seconds: float,
    concurrency: int,
    report: Report,
    each_interval: Callable[[], None],
    interval_s: float = CANARY_EVERY_S,
) -> None:
    """Send cases side by side until none is left, the time is over or a server has
    died.

    each_interval: called `interval_s` after it has last ended, beside the requests.
    """
    ends = time.monotonic() + seconds
    due = time.monotonic() + interval_s
    running: set[Future[Outcome]] = set()
    checking: Future[None] | None = None
    with ThreadPoolExecutor(concurrency + 1) as threads:
        while time.monotonic() < ends and report.statuses[NO_ANSWER] < MAX_FINDINGS:
            for case in itertools.islice(cases, concurrency - len(running)):
                running.add(threads.submit(send, url, case))
            if not running:
                break
            done, running = wait(running, timeout=1, return_when=FIRST_COMPLETED)
            for future in done:
                report.note(future.result())
            if checking is not None and checking.done():
                checking.result()
                checking, due = None, time.monotonic() + interval_s
            if checking is None and time.monotonic() > due:
                checking = threads.submit(each_interval)
        for future in running:
            report.note(future.result())
        if checking is not None:
            checking.result()


def fuzz(
    url: str,
    *,
    seconds: float,
    seed: int,
    num_requests: int | None = None,
    num_skipped: int = 0,
    concurrency: int = 8,
    target_url: str = "",
    hostile_share: float = 0.6,
) -> Report:
    """One seeded run, which ends after `seconds` or with its last request.

    num_skipped: requests of the seed that an earlier run has sent. target_url: of a
    server of the target alone, for canaries.
    """
    rng = random.Random(seed)
    report = Report()
    canaries = Canaries(url, target_url)

    def check() -> None:
        report.findings.extend(canaries.wrong())

    drawn = iter(lambda: draw(rng, hostile_share), None)
    last = None if num_requests is None else num_skipped + num_requests
    cases = itertools.islice(drawn, num_skipped, last)
    drive(url, cases, seconds, concurrency, report, check)
    report.findings.extend(at_rest(url, canaries))
    return report


def at_rest(url: str, canaries: Canaries) -> list[str]:
    """What is wrong once nothing runs any more."""
    if not wait_idle(url):
        return ["the server does not come to rest" if is_alive(url) else "it has ended"]
    found = []
    if used := used_tokens(url):
        found.append(f"{used} KV slots are held by nobody")
    if (held := held_requests(url)) > MAX_HELD:
        found.append(f"states of {held} requests are kept; expected at most {MAX_HELD}")
    return found + canaries.wrong()
