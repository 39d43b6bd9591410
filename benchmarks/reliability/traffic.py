"""Sending requests, and what may come back."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import requests

from benchmarks.reliability.cases import GENERATE, Case

# Long: a machine may be busy with more than the server.
TIMEOUT_S = 300.0
# What a request can be answered with where nothing is wrong with the server.
EXPECTED = (200, 400, 404, 422, 503)
# A grammar without an answer, which SGLang calls its own fault.
KNOWN_500 = ("Grammar accept_token failed",)
HEADERS = {"content-type": "application/json"}
# What stands for a status where the server sent none.
NO_ANSWER, CLIENT_LEFT = 0, -1
NAMES = {NO_ANSWER: "no answer", CLIENT_LEFT: "client left"}


@dataclass(frozen=True)
class Outcome:
    """What became of one request."""

    case: Case
    #: HTTP status, or NO_ANSWER or CLIENT_LEFT.
    status: int
    text: str
    seconds: float
    #: Where the answer leaves the tokens expected, or "".
    differs: str = ""

    @property
    def is_compared(self) -> bool:
        """Whether its tokens were compared with those expected."""
        return self.status == 200 and self.case.expected is not None

    @property
    def problem(self) -> str:
        """What is wrong with the answer, or ""."""
        if self.differs:
            return self.differs
        if self.status == CLIENT_LEFT or self.status in EXPECTED:
            return ""
        if self.status == 500 and any(known in self.text for known in KNOWN_500):
            return ""
        return NAMES.get(self.status, f"status {self.status}")


def send(url: str, case: Case) -> Outcome:
    """One request, to its end or until its client leaves."""
    started = time.monotonic()
    limit = case.leaves_after or TIMEOUT_S
    try:
        reply = requests.post(
            url + case.path, data=case.body.encode(), headers=HEADERS, timeout=limit
        )
        status, text = reply.status_code, reply.text
    except requests.RequestException as e:
        status = CLIENT_LEFT if case.leaves_after else NO_ANSWER
        text = type(e).__name__
    seconds, differs = time.monotonic() - started, ""
    if status == 200 and case.expected is not None:
        differs = difference(json.loads(text)["output_ids"], case.expected)
    return Outcome(case, status, text[:2000], seconds, differs)


def difference(got: Sequence[int], expected: Sequence[int]) -> str:
    """Where two answers part, "" where they are the same."""
    if list(got) == list(expected):
        return ""
    pairs = enumerate(zip(got, expected, strict=False))
    at = next((i for i, (a, b) in pairs if a != b), min(len(got), len(expected)))
    return f"token {at} of {len(expected)} differs from the target's"


def greedy(mode: str | None, **sampling: Any) -> dict[str, Any]:
    """Sampling parameters of a greedy answer. mode: of PARSE, None at other servers."""
    params = {"temperature": 0, "max_new_tokens": 120, **sampling}
    if mode:
        params["custom_params"] = {"parse_mode": mode}
    return params


def answer(url: str, text: str, mode: str | None, **sampling: Any) -> dict[str, Any]:
    """A greedy answer of /generate.

    Raises RuntimeError where there is none.
    """
    body = {"text": text, "sampling_params": greedy(mode, **sampling)}
    reply = requests.post(url + GENERATE, json=body, timeout=TIMEOUT_S)
    if reply.status_code != 200:
        raise RuntimeError(f"HTTP {reply.status_code}: {reply.text[:300]}")
    result: dict[str, Any] = reply.json()
    return result


def wait_idle(url: str, timeout_s: float = TIMEOUT_S) -> bool:
    """Whether the server comes to rest, its cache empty, and still serves.

    SGLang's own check of an idle scheduler ends it where a KV slot is lost.
    """
    if not _flush(url, timeout_s):
        return False
    time.sleep(2)
    # What it generates is cached.
    return is_alive(url) and _flush(url, timeout_s)


def _flush(url: str, timeout_s: float) -> bool:
    """Empty the cache, which SGLang refuses while requests run."""
    deadline = time.monotonic() + timeout_s
    while time.monotonic() < deadline:
        with contextlib.suppress(requests.RequestException):
            if requests.post(url + "/flush_cache", timeout=60).status_code == 200:
                return True
        time.sleep(0.5)
    return False


def is_alive(url: str) -> bool:
    """Whether the scheduler still generates, however long it takes.

    SGLang's own probe gives up after 20 s.
    """
    try:
        return bool(answer(url, "1", None, max_new_tokens=1))
    except (requests.RequestException, RuntimeError):
        return False


def used_tokens(url: str) -> int:
    """KV slots in use, of all ranks."""
    loads = requests.get(url + "/v1/loads?include=all", timeout=30).json()["loads"]
    return sum(int(one.get("num_used_tokens", 0)) for one in loads)


def held_requests(url: str) -> int:
    """Requests whose state the PARSE server keeps, of all ranks."""
    states = requests.get(url + "/server_info", timeout=30).json()["internal_states"]
    return sum(int(one["parse"].get("held_requests", 0)) for one in states)
