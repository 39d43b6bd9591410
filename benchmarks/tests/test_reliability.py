"""What the soak and the freeze of `benchmarks.reliability` call a finding."""

import itertools
import json
import math
import random
import threading
from types import SimpleNamespace

import pytest

from benchmarks.reliability import __main__ as program
from benchmarks.reliability import cases
from benchmarks.reliability.cases import Case
from benchmarks.reliability.freeze import Waits
from benchmarks.reliability.fuzz import Report, drive
from benchmarks.reliability.resources import Resources
from benchmarks.reliability.soak import NUM_SLICES, Slice, drift
from benchmarks.reliability.traffic import Outcome, difference


def parts(*, last_answers=300, last_cpu=100.0, memory=1000, threads=50, warm=300):
    """The parts of a run of an hour; the first ones and the last one are given."""
    held = Resources(1000, 50, 100)
    first = Slice(warm, 300.0, Resources(500, 50, 100), 100.0)
    middle = [Slice(300, 300.0, held, 100.0)] * (NUM_SLICES - 2)
    last = Slice(last_answers, 300.0, Resources(memory, threads, 100), last_cpu)
    return [first, *middle, last]


def test_a_steady_run_has_no_findings():
    """Red if the warm-up, or what a busy machine does, counts as drift."""
    assert drift(parts()) == []
    assert drift(parts(memory=1019, threads=60)) == []
    # A neighbour took half of the machine: the server's own time tells.
    assert drift(parts(last_answers=150, last_cpu=50.0)) == []


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"last_answers": 280}, "answers a second at the end"),
        ({"warm": 400}, "answers a second at the end"),
        ({"last_answers": 280, "last_cpu": None}, "answers a second at the end"),
        ({"memory": 1030}, "memory has grown by 3.0%"),
        ({"threads": 120}, "threads: 120"),
    ],
)
def test_drift_is_found(change, told):
    """Red if a server that gets slower, or keeps more and more, passes the soak."""
    (found,) = drift(parts(**change))
    assert told in found


def test_the_first_token_that_differs_is_told():
    """Red if a wrong or a shorter answer counts as the target's."""
    assert difference([1, 2, 3], (1, 2, 3)) == ""
    assert difference([1, 9, 3], (1, 2, 3)).startswith("token 1 of 3")
    assert difference([1, 2], (1, 2, 3)).startswith("token 2 of 3")


def test_waiting_is_held_against_two_prefill_chunks():
    """Red if a request that keeps others waiting for longer passes the check."""
    waits = Waits(chunk_s=2.0, alone_s=0.5)
    waits.probes[200] += 1
    waits.slowest_other_s = 4.4
    assert waits.findings == []
    waits.slowest_other_s = 4.6
    (found,) = waits.findings
    assert found.startswith("another request waited 4.1 s")
    waits.probes[503] += 2
    assert len(waits.findings) == 2


def test_a_heavy_request_that_is_refused_at_once_is_no_load():
    """Red if the check passes although nothing was measured."""
    waits = Waits(chunk_s=2.0, alone_s=0.5, heavy=[(200, 90.0)])
    assert waits.findings == []
    waits.heavy.append((400, 0.4))
    (found,) = waits.findings
    assert found.endswith("no load")


def test_a_seed_goes_on_behind_a_restart(monkeypatch):
    """Red if a restarted server gets the same requests again, or a finding of an
    earlier part is lost."""
    asked, done = [], []
    server = SimpleNamespace(
        stop=lambda: done.append("stop"),
        start=lambda: done.append("start"),
        wait_ready=lambda: done.append("ready"),
    )

    def fuzz(url, *, num_requests, num_skipped, **_):
        asked.append((num_skipped, num_requests))
        report = Report(findings=[f"from {num_skipped}"])
        report.statuses[200] += num_requests
        return report

    monkeypatch.setattr(program, "fuzz", fuzz)
    words = ("fuzz", "--start", "--requests", "100", "--restarts", "2", "--skip", "7")
    args = program.parse_arguments(words)
    report = program.fuzz_in_parts(args, server, "url", "target")
    assert asked == [(7, 33), (40, 33), (73, 34)]
    assert done == ["stop", "start", "ready"] * 2
    assert report.num_requests == 100 and len(report.findings) == 3


@pytest.mark.parametrize(
    ("words", "seconds"),
    [
        ((), 120.0),
        (("--requests", "4000"), math.inf),
        (("--requests", "4000", "--seconds", "9"), 9.0),
    ],
)
def test_a_number_of_requests_has_no_time_limit(words, seconds):
    """Red if `--requests 4000` ends after two minutes, its requests not sent."""
    args = program.parse_arguments(["fuzz", "--start", *words])
    assert args.seconds == seconds


def test_a_server_that_runs_is_not_restarted(capsys):
    """Red if the fuzzer stops a server that it has not started."""
    with pytest.raises(SystemExit):
        program.parse_arguments(["fuzz", "--url", "http://x", "--restarts", "1"])
    assert "--start" in capsys.readouterr().err


def test_checks_run_beside_the_requests(monkeypatch):
    """Red if the fuzzer sends nothing while it compares answers, which on a slow
    machine is most of the time."""
    sent, may_end = [], threading.Event()

    def send(url, case):
        sent.append(case)
        if len(sent) == 20:
            may_end.set()
        return Outcome(case, 200, "", 0.01)

    monkeypatch.setattr("benchmarks.reliability.fuzz.send", send)
    checks = []

    def check():
        assert may_end.wait(30), "no request is sent beside it"
        checks.append(len(sent))

    report = Report()
    cases = iter(lambda: Case("/", "{}", True), None)
    drive("", itertools.islice(cases, 2000), 60, 2, report, check, interval_s=0)
    assert report.num_requests == 2000 and checks and checks[0] >= 20


def test_a_long_run_draws_the_same_requests_as_its_parts():
    """Red if what one request spoils is still there in a later one: a seed could not be
    gone on with, and bodies would at last hold themselves."""
    first, rng = cases.draw(random.Random(3)), random.Random(3)
    drawn = [cases.draw(rng) for _ in range(3000)]
    assert drawn[0] == first
    again = random.Random(3)
    assert [cases.draw(again) for _ in range(3000)] == drawn


def test_what_once_ended_a_server_is_among_the_requests():
    """Red if a kind of request is never drawn, or cannot be sent."""
    rng = random.Random(3)
    found = [cases.known(rng) for _ in range(1000)]
    assert {path for path, _ in found} == {
        *(cases.GENERATE, cases.UPDATE, "/open_session", "/close_session"),
        *(path for path, _ in cases.OPERATOR),
    }
    texts = " ".join(json.dumps(body) for _, body in found)
    for name in ("stop_regex", "session_params", "custom_labels", '"n"', "regex"):
        assert name in texts
    drawn = [cases.draw(rng).body for _ in range(300)]
    assert sum("session_params" in body for body in drawn) > 0
