"""One request with two hundred verdicts, and what it costs others meanwhile.

Run it on a server of a real model: the embedded one refuses the request at once.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import requests

from benchmarks.reliability.cases import GENERATE
from benchmarks.reliability.traffic import TIMEOUT_S, answer

HEAVY = {
    "parse_verify": ["a "] * 200,
    "parse_judge_suffix": "Is it? " * 98,
}


@dataclass
class Waits:
    """What was seen beside the heavy request."""

    #: HTTP status and seconds of the heavy request.
    heavy: tuple[int, float] = (0, 0.0)
    #: Probes of /health by status.
    probes: Counter[int] = field(default_factory=Counter)
    #: Seconds of the slowest probe and of the slowest one-token request.
    slowest_probe_s: float = 0.0
    slowest_other_s: float = 0.0
    num_others: int = 0

    @property
    def findings(self) -> list[str]:
        """One sentence for each thing that is wrong."""
        bad = sum(num for status, num in self.probes.items() if status != 200)
        return [f"{bad} probes of /health failed"] if bad else []

    def lines(self) -> Iterator[str]:
        """For people."""
        status, seconds = self.heavy
        yield f"the heavy request: HTTP {status} after {seconds:.1f} s"
        yield f"probes of /health by status: {dict(self.probes)}"
        yield f"the slowest probe took {self.slowest_probe_s:.1f} s"
        waited = f"{self.num_others} requests beside it waited at most"
        yield f"{waited} {self.slowest_other_s:.1f} s each"
        yield from self.findings


def freeze(url: str) -> Waits:
    """Send the heavy request, and until it is answered probes and short requests."""
    waits, is_over = Waits(), threading.Event()

    def heavy() -> None:
        params = {"max_new_tokens": 1, "custom_params": HEAVY}
        body = {"text": "1+2", "sampling_params": params}
        started = time.monotonic()
        try:
            status = requests.post(url + GENERATE, json=body, timeout=900).status_code
            waits.heavy = status, time.monotonic() - started
        finally:
            is_over.set()

    def others() -> None:
        for seconds in _repeated(is_over, lambda: _short(url)):
            waits.num_others += 1
            waits.slowest_other_s = max(waits.slowest_other_s, seconds)

    def probes() -> None:
        def probe() -> None:
            reply = requests.get(url + "/health", timeout=TIMEOUT_S)
            waits.probes[reply.status_code] += 1

        for seconds in _repeated(is_over, probe):
            waits.slowest_probe_s = max(waits.slowest_probe_s, seconds)

    with ThreadPoolExecutor(3) as threads:
        for one in [threads.submit(f) for f in (heavy, others, probes)]:
            one.result()
    return waits


def _short(url: str) -> None:
    answer(url, "1+2", None, max_new_tokens=1)


def _repeated(is_over: threading.Event, act: Callable[[], None]) -> Iterator[float]:
    """Seconds of each time that it was done."""
    while not is_over.is_set():
        started = time.monotonic()
        act()
        yield time.monotonic() - started
        is_over.wait(0.1)
