"""Sending requests, and what may come back."""

from __future__ import annotations

import contextlib
import json
import time
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

    @property
    def problem(self) -> str:
        """What is wrong with the answer, or ""."""
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
    return Outcome(case, status, text[:2000], time.monotonic() - started)


def answer(url: str, text: str, mode: str | None, **sampling: Any) -> dict[str, Any]:
    """A greedy answer of /generate. mode: of PARSE, None at other servers.

    Raises RuntimeError where there is none.
    """
    params = {"temperature": 0, "max_new_tokens": 120, **sampling}
    if mode:
        params["custom_params"] = {"parse_mode": mode}
    body = {"text": text, "sampling_params": params}
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


def case_of(path: str, body: Any) -> Case:
    return Case(path, json.dumps(body), False)
