"""Requests with 150 verdicts each, and what they cost others meanwhile.

Nobody is to wait longer than twice what the longest prefill chunk takes, which is
measured first, on the same server. Run it on a server of a real model: the embedded one
refuses the request at once.
"""

from __future__ import annotations

import random
import statistics
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
    "parse_verify": ["a "] * 150,
    "parse_judge_suffix": "Is it? " * 98,
}


# Longest prefill chunks that another request may wait for.
MAX_CHUNKS = 2.0
NUM_CHUNKS = 5


@dataclass
class Waits:
    """What was seen beside the heavy requests."""

    #: Tokens of the longest prefill chunk, and the seconds that it takes.
    chunk_tokens: int = 0
    chunk_s: float = 0.0
    #: Seconds of a one-token request on the idle server.
    alone_s: float = 0.0
    #: HTTP status and seconds of the heavy requests.
    heavy: list[tuple[int, float]] = field(default_factory=list)
    #: Probes of /health by status.
    probes: Counter[int] = field(default_factory=Counter)
    #: Seconds of the slowest probe and of the slowest one-token request.
    slowest_probe_s: float = 0.0
    slowest_other_s: float = 0.0
    num_others: int = 0

    @property
    def waited_s(self) -> float:
        """Longest that another request waited, without its own time."""
        return max(0.0, self.slowest_other_s - self.alone_s)

    @property
    def findings(self) -> list[str]:
        """One sentence for each thing that is wrong."""
        found = []
        if any(seconds < self.chunk_s for _, seconds in self.heavy):
            found.append("a heavy request took less than a prefill chunk: no load")
        if bad := sum(num for status, num in self.probes.items() if status != 200):
            found.append(f"{bad} probes of /health failed")
        if self.waited_s > MAX_CHUNKS * self.chunk_s:
            found.append(
                f"another request waited {self.waited_s:.1f} s; expected at most "
                f"{MAX_CHUNKS:.0f} prefill chunks of {self.chunk_s:.1f} s"
            )
        return found

    def lines(self) -> Iterator[str]:
        """For people."""
        yield f"a prefill chunk of {self.chunk_tokens} tokens: {self.chunk_s:.2f} s"
        yield f"a one-token request alone: {self.alone_s:.2f} s"
        for status, seconds in self.heavy:
            yield f"a heavy request: HTTP {status} after {seconds:.1f} s"
        yield f"probes of /health by status: {dict(self.probes)}"
        yield f"the slowest probe took {self.slowest_probe_s:.1f} s"
        took = f"the slowest of {self.num_others} requests beside it took"
        yield f"{took} {self.slowest_other_s:.2f} s"
        yield f"so it waited for {self.waited_s / self.chunk_s:.2f} prefill chunks"
        yield from self.findings


def freeze(url: str, num_heavy: int = 1) -> Waits:
    """Send the heavy requests side by side, and until they are answered probes and
    short requests."""
    waits, is_over = Waits(), threading.Event()
    waits.chunk_tokens, waits.chunk_s = _longest_chunk(url)
    waits.alone_s = statistics.median(_seconds(lambda: _short(url)) for _ in range(5))

    def heavy() -> None:
        params = {"max_new_tokens": 1, "custom_params": HEAVY}
        body = {"text": "1+2", "sampling_params": params}
        started = time.monotonic()
        status = requests.post(url + GENERATE, json=body, timeout=900).status_code
        waits.heavy.append((status, time.monotonic() - started))

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

    with ThreadPoolExecutor(num_heavy + 2) as threads:
        beside = [threads.submit(f) for f in (others, probes)]
        try:
            for one in [threads.submit(heavy) for _ in range(num_heavy)]:
                one.result()
        finally:
            is_over.set()
        for one in beside:
            one.result()
    return waits


def _longest_chunk(url: str) -> tuple[int, float]:
    """(tokens, seconds) of the longest prefill chunk: the median of a few prompts of
    that length, none of which is cached."""
    info = requests.get(url + "/server_info", timeout=TIMEOUT_S).json()
    chunk = info.get("chunked_prefill_size") or 0
    num = chunk if chunk > 0 else info["max_prefill_tokens"]
    num = min(num, info["max_req_input_len"] - 1)
    # Other prompts each time: a server that was asked before has cached the last ones.
    rng, params = random.Random(), {"max_new_tokens": 1, "temperature": 0}

    def prompt() -> None:
        ids = [rng.randrange(100, 400) for _ in range(num)]
        body = {"input_ids": ids, "sampling_params": params}
        requests.post(url + GENERATE, json=body, timeout=900).raise_for_status()

    return num, statistics.median(_seconds(prompt) for _ in range(NUM_CHUNKS))


def _seconds(act: Callable[[], None]) -> float:
    started = time.monotonic()
    act()
    return time.monotonic() - started


def _short(url: str) -> None:
    answer(url, "1+2", None, max_new_tokens=1)


def _repeated(is_over: threading.Event, act: Callable[[], None]) -> Iterator[float]:
    """Seconds of each time that it was done."""
    while not is_over.is_set():
        yield _seconds(act)
        is_over.wait(0.1)
