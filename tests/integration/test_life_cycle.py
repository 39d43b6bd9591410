"""What operators and agents do beside generating, under load, beside a stock server."""

import json
import re
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial

import pytest
import requests
import torch
from safetensors.torch import load_file

from sglang_parse.embedded import DRAFT_PATH, TARGET_PATH
from sglang_parse.embedded.task import make_problems
from tests.support.client import chat_ids, outcome, report
from tests.support.trainer import Trainer, send_tensors

pytestmark = pytest.mark.own_server
EXACT = {"parse_mode": "exact"}
TEXT = "Step 1: abc\nStep 2: def\n@@"
FORCED = {"parse_draft": TEXT, "parse_threshold": 0, "return_meta_info": True}
ASKED = [{"role": "user", "content": "Hello"}]


@pytest.fixture(scope="module")
def parse(pool):
    return pool.get("agents")


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [chat_ids(tokenizer, p.prompt) for p in make_problems(12, seed=555)]


@pytest.fixture(scope="module")
def expected(pool, prompts):
    return [outcome(r) for r in pool.get("agents-target").generate_all(prompts, 8)]


# -- Options and reports at every endpoint ----------

ENDPOINTS = {
    "/v1/messages": {"messages": ASKED, "max_tokens": 60, "stop_sequences": ["@@"]},
    "/v1/responses": {"input": "Hello", "max_output_tokens": 60, "stop": ["@@"]},
    "/v1/chat/completions": {"messages": ASKED, "max_tokens": 60, "stop": ["@@"]},
    "/v1/completions": {"prompt": "Hello", "max_tokens": 60, "stop": ["@@"]},
    "/api/chat": {"messages": ASKED, "options": {"stop": ["@@"], "num_predict": 60}},
    "/api/generate": {"prompt": "Hi", "options": {"stop": ["@@"], "num_predict": 60}},
}


@pytest.mark.parametrize("path", ENDPOINTS)
def test_options_in_metadata_reach_the_request(parse, path):
    """Red if an endpoint drops an option, or has no report, streamed or not, or if the
    text of an answer is lost from its stream."""
    body = {"model": str(TARGET_PATH), "temperature": 0, **ENDPOINTS[path]}
    name = "options" if "/api/" in path else "metadata"
    forced = {key: json.dumps(v) for key, v in FORCED.items()} | {"parse_draft": TEXT}
    body[name] = {**body.get(name, {}), **forced}
    reply = parse.post(path, {**body, "stream": False})
    assert reply.status_code == 200, reply.text
    assert "Step 2: def" in reply.text
    answer = reply.json()
    (told,) = answer.get("choices", [answer])[0]["meta_info"]["parse"]
    assert told["client_text_tokens"] > 0
    with requests.post(parse.url + path, json={**body, "stream": True}) as reply:
        assert reply.status_code == 200, reply.text
    told = [e for e in reply.text.splitlines() if '"client_text_tokens"' in e]
    assert len(told) == 1 and told[0] in reply.text.splitlines()[-6:]
    assert "def" in "".join(
        re.findall(
            r'"(?:text|thinking|\w*content|response|delta)": ?"(.*?)"', reply.text
        )
    )


@pytest.mark.parametrize("path", ENDPOINTS)
def test_options_that_disagree_are_refused(parse, path):
    """Red if one of two values of an option is dropped, or a wrong one is served."""
    body = {"model": str(TARGET_PATH), **ENDPOINTS[path]}
    name = "options" if "/api/" in path else "metadata"
    for custom, metadata, told in (
        ({"parse_mode": "off"}, {"parse_mode": "exact"}, "parse_mode is given twice"),
        ({}, {"parse_mode": "fast"}, "custom_params.parse_mode is 'fast'"),
    ):
        reply = parse.post(path, {**body, "custom_params": custom, name: metadata})
        assert reply.status_code == 400 and told in reply.text


# -- Life cycle under load ----------


@contextmanager
def paused(server, mode):
    assert server.post("/pause_generation", {"mode": mode}).status_code == 200
    yield
    assert server.post("/continue_generation", {}).status_code == 200


def pause(mode):
    def act(server, rids):
        for _ in range(2):
            time.sleep(0.5)
            with paused(server, mode):
                time.sleep(0.2)

    return act


def abort(server, rids):
    """Some requests, some of them twice, and their names are used again."""
    for rid in (*rids[::3], *rids[::3]):
        time.sleep(0.1)
        server.post("/abort_request", {"rid": rid})


def update_weights(server, rids):
    """Those that do not fit, none, and the served ones again."""
    for path, status in ((DRAFT_PATH, 400), ("/none", 400), (TARGET_PATH, 200)):
        time.sleep(0.2)
        body = {"model_path": str(path), "abort_all_requests": False}
        reply = server.post("/update_weights_from_disk", body)
        assert reply.status_code == status, reply.text
        assert path != DRAFT_PATH or "are missing" in reply.json()["message"]


OWN = load_file(TARGET_PATH / "model.safetensors")


def update_through(server, send):
    """Weights that do not fit, behind others that would change each answer, and the
    served ones, between answers and in the middle of those that are retracted."""
    *names, last = OWN
    others = {name: torch.zeros_like(OWN[name]) for name in names}
    assert "has the shape" in send({**others, last: OWN[last][:-1]}, status=400)
    time.sleep(0.3)
    send(OWN, flush_cache=False)
    time.sleep(0.3)
    with paused(server, "retract"):
        send(OWN)


def update_from_tensor(server, rids):
    update_through(server, partial(send_tensors, server))
    told = send_tensors(server, OWN, status=400, load_format="none.such")
    assert "cannot be loaded" in told


def update_from_distributed(server, rids):
    trainer = Trainer(server)
    update_through(server, trainer.send)
    trainer.close()


def flush(server, rids):
    """Refused while requests run, and without an effect on them; so is a release of
    memory, which no CPU server can do."""
    for _ in range(5):
        time.sleep(0.2)
        assert server.post("/flush_cache").status_code in (200, 400)
        assert server.post("/release_memory_occupation", {}).status_code == 400


ACTS = {
    "abort": pause("abort"),
    "retract": pause("retract"),
    "in_place": pause("in_place"),
    "abort_request": abort,
    "update_weights": update_weights,
    "update_from_tensor": update_from_tensor,
    "update_from_distributed": update_from_distributed,
    "flush_cache": flush,
}
ABORTING = ("abort", "abort_request")


@pytest.mark.parametrize("act", ACTS)
def test_exact_answers_survive_what_an_operator_does(parse, prompts, expected, act):
    """Red if a request that is interrupted while drafts are held gets another answer
    than the stock server's, is counted wrong, or leaves slots behind."""
    # The names of aborted requests are used again.
    for _ in range(1 + (act in ABORTING)):
        rids = [f"{act}-{k}" for k in range(len(prompts))]
        cases = [
            (prompt, {"custom": EXACT, "top": {"rid": rid}})
            for prompt, rid in zip(prompts, rids, strict=True)
        ]
        helper = ThreadPoolExecutor(1)
        acting = helper.submit(ACTS[act], parse, rids)
        with ThreadPoolExecutor(8) as threads:
            replies = list(
                threads.map(
                    lambda c: parse.post("/generate", parse.body(c[0], **c[1])), cases
                )
            )
        acting.result(timeout=120)
        num_aborted = 0
        for reply, own in zip(replies, expected, strict=True):
            found = reply.json()
            if reply.status_code != 200 or is_aborted(found):
                num_aborted += 1
                assert own[0][: len(found.get("output_ids", ()))] == found.get(
                    "output_ids", []
                )
                continue
            assert outcome(found) == own
            meta, told = found["meta_info"], report(found)
            assert meta["completion_tokens"] == len(own[0])
            assert told["kept_tokens"] + told["written_tokens"] == len(own[0])
        assert num_aborted == 0 or act in ABORTING
    parse.flush()  # only where nothing is held
    again = parse.generate_all(prompts[:4], 4, custom=EXACT)
    assert list(map(outcome, again)) == expected[:4]


@pytest.mark.parametrize("name", ["agents", "exact"])
def test_memory_is_not_released_while_requests_run(pool, prompts, name):
    """Red if SGLang's assertion ends the scheduler and the answer that runs, where one
    or two processes serve HTTP. No CPU server releases memory at rest."""
    server = pool.get(name)
    off = {"parse_mode": "off"}
    options = {"custom": off, "ignore_eos": True, "max_new_tokens": 200}
    chunks = server.stream(prompts[0], **options)
    next(chunks)
    for path, told in (("release", "while requests run"), ("resume", "on a GPU alone")):
        reply = server.post(f"/{path}_memory_occupation", {})
        assert reply.status_code == 400 and told in reply.json()["error"]["message"]
    *_, last = chunks
    assert last["meta_info"]["completion_tokens"] == 200
    server.flush()
    reply = server.post("/release_memory_occupation", {})
    assert reply.status_code == 400 and "on a GPU alone" in reply.text
    assert server.is_alive()


def is_aborted(found) -> bool:
    return found.get("meta_info", {}).get("finish_reason", {}).get("type") == "abort"


def test_preempted_requests_get_the_same_answers(pool, prompts, expected):
    """Red if a request that gives way to a more urgent one while its draft is held goes
    on with other tokens, or is counted wrong."""
    server = pool.get("paged")
    cases = [
        (prompt, {"top": {"priority": 100 * (k > 6)}})
        for k, prompt in enumerate(prompts)
    ]
    with ThreadPoolExecutor(len(cases)) as threads:
        waiting = []
        for prompt, options in cases:
            waiting.append(threads.submit(server.generate, prompt, **options))
            time.sleep(0.05)
        found = [one.result() for one in waiting]
    assert list(map(outcome, found)) == expected
    assert sum(one["meta_info"]["num_retractions"] for one in found) > 0
    for one, own in zip(found, expected, strict=True):
        assert one["meta_info"]["completion_tokens"] == len(own[0])
    server.flush()
