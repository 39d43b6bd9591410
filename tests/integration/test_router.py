"""Two PARSE servers behind sglang-router or its successor smg: what a client gets, and
what survives."""

import contextlib
import importlib.util
import itertools
import json
import os
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import requests

from benchmarks.embedded_answers import render_answer
from sglang_parse.demo.servers import HOST, free_port
from sglang_parse.embedded import TARGET_PATH
from sglang_parse.embedded.task import make_problems
from tests.integration.conftest import FLAGS
from tests.support.warm_servers import WarmServer

CHAT, COMPLETIONS, GENERATE = "/v1/chat/completions", "/v1/completions", "/generate"
# smg chooses workers by the name of their model, and refuses any other.
MODEL = str(TARGET_PATH)
# A busy machine starts and answers slowly.
WAIT_S = 300
SCALE = "SGLANG_PARSE_TEST_SCALE"
MODES = ("semantic", "exact", "off") if SCALE in os.environ else ("semantic",)

ROUTERS = [name for name in ("sglang_router", "smg") if importlib.util.find_spec(name)]


@pytest.fixture(scope="module")
def second(pool, tmp_path_factory):
    """A worker of this module's own, which its tests may end."""
    pool.get("parse")
    folder = tmp_path_factory.mktemp("worker")
    with WarmServer(FLAGS["parse"], "second", folder / "second.log") as process:
        yield process


@pytest.fixture(scope="module")
def workers(pool, second):
    return [pool.get("parse").url, second.url]


@pytest.fixture(scope="module", params=ROUTERS)
def url(request, workers, tmp_path_factory):
    """A router in front of the workers, which get requests in turn."""
    url = f"http://{HOST}:{free_port()}"
    flags = (
        *("--host", HOST, "--port", url.rpartition(":")[2]),
        *("--prometheus-port", str(free_port()), "--policy", "round_robin"),
        *("--worker-urls", *workers, "--health-check-interval-secs", "1"),
    )
    with open(tmp_path_factory.mktemp("router") / "log", "wb") as log:
        command = [sys.executable, "-m", f"{request.param}.launch_router", *flags]
        router = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_ready(url, router)
        yield url
    finally:
        router.kill()
        router.wait()


def wait_ready(url, router):
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        with contextlib.suppress(requests.RequestException):
            if requests.get(url + "/readiness", timeout=5).ok:
                return
        assert router.poll() is None, "the router has ended"
        time.sleep(0.2)
    raise AssertionError("the router is not ready")


@pytest.fixture(scope="module")
def problems():
    return make_problems(6, seed=99)


def post(url, path, body):
    reply = requests.post(url + path, json=body, timeout=WAIT_S)
    assert reply.status_code == 200, reply.text[:500]
    return reply


def chat(problem, **more):
    messages = [{"role": "user", "content": problem.prompt}]
    fixed = {"model": MODEL, "temperature": 0, "max_tokens": 160}
    return {**fixed, "messages": messages, **more}


def choice_of(reply):
    (choice,) = reply.json()["choices"]
    return choice


def decided(report):
    """What a report says apart from times."""
    names = ("mode", "kept_tokens", "draft_tokens", "client_text_tokens")
    return {name: report.get(name) for name in names}


# -- What a client gets ------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_modes_and_reports_of_chats(url, workers, problems, mode):
    """Red if an option or the report of a chat is lost on the way."""
    metadata = {"parse_mode": mode, "parse_threshold": "0.6", "parse_report": "true"}
    body = chat(problems[0], metadata=metadata | {"return_meta_info": "true"})
    custom = {"parse_mode": mode, "parse_threshold": 0.6, "parse_report": True}
    plain = chat(problems[0], custom_params=custom, return_meta_info=True)
    for _ in workers:
        got = choice_of(post(url, CHAT, body))
        direct = choice_of(post(workers[0], CHAT, plain))
        assert got["message"] == direct["message"]
        (ours,), (its) = got["meta_info"]["parse"], direct["meta_info"]["parse"]
        assert decided(ours) == decided(its[0])
        assert ours["mode"] == mode


def test_predictions_streams_and_other_endpoints(url, problems):
    """Red if a prediction, a stream's report, or an option of /generate is lost."""
    answer = render_answer(problems[1], "A")
    usage = post(url, CHAT, chat(problems[1], metadata={"prediction": answer}))
    details = usage.json()["usage"]["completion_tokens_details"]
    assert details["accepted_prediction_tokens"] > 20
    metadata = {"parse_mode": "exact", "return_meta_info": "true"}
    stream = post(url, CHAT, chat(problems[1], metadata=metadata, stream=True))
    chunks = [
        json.loads(line[6:])
        for line in stream.text.splitlines()
        if line.startswith("data: {")
    ]
    texts = (c["choices"][0]["delta"].get("content") or "" for c in chunks)
    assert "".join(texts) == choice_of(usage)["message"]["content"]
    reports = [c["choices"][0]["meta_info"] for c in chunks if "meta_info" in str(c)]
    assert reports[-1]["parse"][0]["mode"] == "exact"
    body = {"model": MODEL, "prompt": problems[2].prompt, "max_tokens": 40}
    off = {"custom_params": {"parse_mode": "off"}, "return_meta_info": True}
    for more, mode in ((off, "off"), ({"metadata": metadata}, "exact")):
        reply = post(url, COMPLETIONS, body | {"temperature": 0} | more)
        (report,) = choice_of(reply)["meta_info"]["parse"]
        assert report["mode"] == mode
    options = {"parse_mode": "exact", "parse_report": True}
    params = {"temperature": 0, "max_new_tokens": 40}
    body = {"text": problems[2].prompt, "sampling_params": params}
    generated = post(url, GENERATE, body | {"session_params": options}).json()
    assert generated["meta_info"]["parse"][0]["mode"] == "exact"


def test_wrong_options_are_told(url, problems):
    """Red if a router turns the sentence for a wrong option into something else."""
    body = chat(problems[0], metadata={"parse_mode": "best"})
    reply = requests.post(url + CHAT, json=body, timeout=WAIT_S)
    assert reply.status_code == 400
    assert "parse_mode" in reply.text


def load(url, problems, stop):
    """Statuses of chats, one after the other until `stop` is set."""
    seen = set()
    for problem in itertools.cycle(problems):
        if stop.is_set():
            return seen
        body = chat(problem, max_tokens=8)
        reply = requests.post(url + CHAT, json=body, timeout=WAIT_S)
        seen.add(reply.status_code)


def test_health_checks_pass_beside_full_queues(url, workers, problems):
    """Red if a worker whose queue is full is taken for dead, by the router or by an
    orchestrator."""
    checks, stop = [], threading.Event()
    places = (url + "/readiness", *(one + "/health_generate" for one in workers))
    with ThreadPoolExecutor(80) as threads:
        running = [threads.submit(load, url, problems, stop) for _ in range(80)]
        try:
            until = time.monotonic() + 5
            while time.monotonic() < until:
                for place in places:
                    checks.append(requests.get(place, timeout=WAIT_S).status_code)
        finally:
            stop.set()
    assert len(checks) >= 3 and set(checks) == {200}
    assert set().union(*(one.result() for one in running)) == {200}
