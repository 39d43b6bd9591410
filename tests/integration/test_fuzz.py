"""Hostile and valid requests, drawn at random, at a real server."""

import os

from benchmarks.reliability.fuzz import fuzz

SECONDS = float(os.environ.get("SGLANG_PARSE_TEST_FUZZ_SECONDS", "45"))
# The same requests at each speed of the machine, unless it is very slow.
NUM_REQUESTS = int(os.environ.get("SGLANG_PARSE_TEST_FUZZ_REQUESTS", "400"))


def test_nothing_ends_hangs_or_changes(pool):
    """Red if a request ends the scheduler or gets a 5xx that is not documented, if a
    KV slot is lost, or if an exact answer is not the target's."""
    target, parse = pool.get("target"), pool.get("parse")
    report = fuzz(
        parse.url,
        seconds=SECONDS,
        num_requests=NUM_REQUESTS,
        seed=28,
        target_url=target.url,
    )
    assert not report.findings, "\n".join(report.lines())
    assert report.statuses[200] and report.statuses[400]
