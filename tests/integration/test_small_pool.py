"""A pool that holds two requests and a bit: windows shrink, requests are retracted.

SGLang's idle leak check is on: a slot lost or freed twice stops the scheduler.
"""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.support.client import finish, outcome, report

LONG = {"ignore_eos": True, "max_new_tokens": 110}
SHORT = {"max_new_tokens": 180}  # the answers end by themselves


@pytest.fixture(scope="module")
def expected(pool, prompts):
    """The target's answers; its server makes room for the small one afterwards."""
    target = pool.get("target")
    return {
        name: [outcome(r) for r in target.generate_all(prompts[:8], 8, **options)]
        for name, options in (("long", LONG), ("short", SHORT))
    }


@pytest.fixture
def small(expected, pool):
    server = pool.get("small")
    yield server
    assert server.is_alive()
    server.flush()  # behind the scheduler's idle check


def num_retractions(results) -> int:
    return sum(r["meta_info"]["num_retractions"] for r in results)


AS_TARGET = [{"parse_mode": "exact"}, {"parse_threshold": 2.0}, {"parse_mode": "off"}]
SEMANTIC = {
    "default": {"parse_window": 0},
    "many suffixes": {
        "parse_threshold": 0.0,
        "parse_window": 0,
        "parse_segmenter": "fixed:3",
    },
    "suffix as large as the pool": {
        "parse_judge_suffix": "Is it right? " * 100,
        "parse_threshold": 0.0,
    },
}


@pytest.mark.combines("pages", "head")
@pytest.mark.parametrize(
    ("custom", "name", "options"),
    [
        (AS_TARGET[0], "long", LONG),
        (AS_TARGET[0], "short", SHORT),
        (AS_TARGET[1], "short", SHORT),
        (AS_TARGET[2], "long", LONG),
    ],
    ids=str,
)
def test_requests_equal_target(small, prompts, expected, custom, name, options):
    """Red if a round overruns the pool, or a retraction loses or doubles a token."""
    results = small.generate_all(prompts[:8], 8, custom=custom, **options)
    assert num_retractions(results) > 0, "nothing was retracted"
    if custom == {"parse_mode": "exact"}:
        assert sum(report(r)["eagle_kept_tokens"] for r in results) > 0
    assert [outcome(r) for r in results] == expected[name]


@pytest.mark.parametrize("custom", SEMANTIC.values(), ids=SEMANTIC.keys())
def test_semantic_requests_in_a_small_pool(small, prompts, custom):
    """Red if suffix slots are not there, or are leaked by a retraction."""
    results = small.generate_all(prompts[:8], 8, custom=custom, **LONG)
    assert [len(r["output_ids"]) for r in results] == [LONG["max_new_tokens"]] * 8
    assert all(report(r)["mode"] == "semantic" for r in results)
    results = small.generate_all(prompts[:8], 8, custom=custom, **SHORT)
    assert all(finish(r)[0] in ("stop", "length") for r in results)
    assert all(r["text"] for r in results)


def test_one_request_as_long_as_the_pool(small, prompts):
    """Red if a round takes slots that the request itself still needs."""
    result = small.generate(
        prompts[0], ignore_eos=True, max_new_tokens=450, custom={"parse_window": 0}
    )
    assert len(result["output_ids"]) == 450


def test_aborts_under_memory_pressure(small, prompts):
    """Red if a request aborted while waiting or retracted keeps slots."""
    begun = threading.Event()

    def end_of(prompt):
        chunks = small.stream(prompt, custom={"parse_threshold": 0.0}, **LONG)
        first = next(chunks)
        begun.set()
        return finish([first, *chunks][-1])[0]

    with ThreadPoolExecutor(6) as threads:
        ends = [threads.submit(end_of, p) for p in prompts[:6]]
        assert begun.wait(60)
        time.sleep(0.5)  # those that wait have arrived by then, as a rule
        assert small.post("/abort_request", {"abort_all": True}).status_code == 200
        assert {e.result() for e in ends} <= {"abort", "length"}
    deadline = time.monotonic() + 60
    while small.post("/flush_cache").status_code != 200:
        assert time.monotonic() < deadline, "a request is still running"
        time.sleep(0.5)


def test_a_pool_that_runs_full(pool, prompts, expected):
    """Red if a round takes more slots than its windows count, which only pages of one
    token show, or the server ends where it should retract a request."""
    server = pool.get("full")
    results = server.generate_all(prompts[:8], 8, custom=AS_TARGET[0], **SHORT)
    assert num_retractions(results) > 0, "nothing was retracted"
    assert [outcome(r) for r in results] == expected["short"]
    assert server.is_alive()
    server.flush()  # behind the scheduler's idle check
