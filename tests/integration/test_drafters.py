"""The n-gram drafter and a draft server, on real servers."""

import os
import re

import pytest
import requests

from benchmarks.models import OTHER_DRAFT_PATH
from sglang_parse.demo.servers import HOST, free_port
from sglang_parse.embedded import DRAFT_PATH
from sglang_parse.embedded.task import make_problems
from tests.integration.conftest import ALGORITHM, COMMON
from tests.support.bad_draft_server import CASES, draft_server
from tests.support.client import Server, chat_choice, chat_ids, outcome, report
from tests.support.warm_servers import WarmServer

#: Requests of a comparison with the target alone; all prompts where a number is set.
NUM = int(os.environ.get("SGLANG_PARSE_TEST_PROMPTS", "8"))


@pytest.fixture(scope="module")
def expected(pool, prompts):
    """The target's own greedy answers."""
    return [outcome(r) for r in pool.get("target").generate_all(prompts[:NUM], 8)]


@pytest.fixture(scope="module")
def draft(tmp_path_factory):
    """A server of a middle model, which judges a smaller one's draft in its turn."""
    flags = (
        *("--model-path", str(DRAFT_PATH), *COMMON[2:]),
        *("--speculative-algorithm", "PARSE", "--no-speculative-parse-adaptive"),
        *("--speculative-draft-model-path", str(OTHER_DRAFT_PATH)),
    )
    log = tmp_path_factory.mktemp("draft") / "draft.log"
    with WarmServer(flags, "draft", log) as process:
        yield process


@pytest.fixture(scope="module")
def cascade(draft, tmp_path_factory):
    """PARSE with copies, and that server as its draft."""
    flags = (
        *(*COMMON, *ALGORITHM, "--speculative-parse-drafters", "ngram,remote"),
        *("--speculative-parse-draft-url", f"{draft.url}/v1"),
        "--no-speculative-parse-adaptive",
    )
    log = tmp_path_factory.mktemp("cascade") / "cascade.log"
    with WarmServer(flags, "cascade", log) as process:
        yield Server(process.url)


@pytest.mark.parametrize("concurrency", [1, 16])
def test_exact_answers_are_the_targets_own(cascade, prompts, expected, concurrency):
    """Red if a copied or a streamed token stands that the target did not choose. On a
    busy machine a draft may come too late, so answers are made until one has come."""
    drafted = 0
    for _ in range(8):
        custom = {"parse_mode": "exact"}
        results = cascade.generate_all(prompts[:NUM], concurrency, custom=custom)
        assert [outcome(r) for r in results] == expected
        drafted += sum(report(r)["drafted_by"].get("remote", 0) for r in results)
        if drafted:
            break
    assert drafted


def test_a_quote_is_copied(cascade, pool, tokenizer):
    """Red if nothing of a passage that is written again is copied, or the answer is not
    the target's own. A grammar has the target quote its prompt; the target may spell
    it in other tokens."""
    text = " ".join(p.prompt for p in make_problems(3, seed=7))[:400]
    text = "".join(c for c in text if c.isalnum() or c in " .,?")
    pattern = re.escape(text).replace("\\ ", " ")
    prompt = chat_ids(tokenizer, text)
    options = {"custom": {"parse_mode": "exact"}, "regex": pattern}
    ours, own = (s.generate(prompt, **options) for s in (cascade, pool.get("target")))
    assert outcome(ours)[:2] == outcome(own)[:2]
    assert report(ours)["kept_by"].get("ngram", 0) > 3


def judged_answers(cascade, prompts) -> list[dict]:
    """Reports of answers. On a busy machine much of a short one is written before its
    draft comes, so they are asked for until drafts have come in time."""
    reports: list[dict] = []
    for _ in range(8):
        reports += map(report, cascade.generate_all(prompts[:NUM], 4))
        kept = sum(one["kept_by"].get("remote", 0) for one in reports)
        if kept > 50 and sum(one["kept_segments"] for one in reports) > 3:
            break
    return reports


def test_streamed_drafts_are_judged(cascade, prompts):
    """Red if text of a draft server never becomes a part of an answer by verdict."""
    reports = judged_answers(cascade, prompts)
    assert {one["mode"] for one in reports} == {"semantic"}
    assert sum(one["kept_by"].get("remote", 0) for one in reports) > 50
    assert sum(one["kept_segments"] for one in reports) > 3


def test_each_model_of_a_chain_judges_the_one_before(cascade, draft, prompts):
    """Red if the middle server hands its draft on unjudged, or the target takes it
    unjudged."""
    before = counters(draft.url)
    reports = judged_answers(cascade, prompts)
    after = counters(draft.url)
    assert after["judged_segments"] > before["judged_segments"]
    assert after["drafted_by"]["model"] > before["drafted_by"].get("model", 0)
    assert sum(one["judged_segments"] for one in reports) > 3


def test_a_chat_is_continued_by_the_draft_server(cascade, draft, pool):
    """Red if the rendered text of a chat does not reach the draft server, or what it
    streams behind it becomes no part of any answer."""
    before = draft.log_path.read_text().count("POST /v1/completions")
    kept = 0
    for problem in make_problems(4, seed=31):
        ours, own = (
            chat_choice(s, problem.prompt, {"parse_mode": "exact"})
            for s in (cascade, pool.get("target"))
        )
        assert ours["message"]["content"] == own["message"]["content"]
        kept += report(ours)["kept_by"].get("remote", 0)
    assert kept > 0
    assert draft.log_path.read_text().count("POST /v1/completions") > before


@pytest.fixture(scope="module")
def misbehaving(tokenizer, prompts, expected, tmp_path_factory):
    """PARSE whose draft server answers in the way that is set."""
    own = zip(prompts[:NUM], expected, strict=True)
    answers = {tokenizer.decode(ids): text for ids, (_, text, _) in own}
    port = free_port()
    flags = (
        *(*COMMON, *ALGORITHM, "--no-speculative-parse-adaptive"),
        *("--speculative-parse-draft-url", f"http://{HOST}:{port}/v1"),
    )
    log = tmp_path_factory.mktemp("misbehaving") / "server.log"
    with (
        draft_server(port, answers, None) as (_, case),
        WarmServer(flags, "misbehaving", log) as process,
    ):
        yield Server(process.url), case


@pytest.mark.parametrize("name", CASES)
def test_a_draft_server_that_misbehaves_changes_no_answer(
    misbehaving, prompts, expected, name
):
    """Red if an answer ends early, waits for a slow server, or holds what the target
    did not write; and for the first case if its right text is not used."""
    server, case = misbehaving
    case.value = list(CASES).index(name)
    custom = {"parse_mode": "exact"}
    num = NUM if name == "right" else 4
    results = server.generate_all(prompts[:num], 4, custom=custom)
    assert [outcome(r) for r in results] == expected[:num]
    kept = sum(report(r)["kept_by"].get("remote", 0) for r in results)
    assert kept > 50 if name == "right" else server.is_alive()


def counters(url: str) -> dict:
    info = requests.get(f"{url}/server_info", timeout=60).json()
    return info["internal_states"][0]["parse"]


def test_answers_are_whole_without_the_draft_server(cascade, draft, prompts, expected):
    """Red if a draft server that dies ends or changes an answer, or nobody says so.

    The last test of this module: it stops the server.
    """
    draft.stop()
    custom = {"parse_mode": "exact"}
    results = cascade.generate_all(prompts[:NUM], 4, custom=custom)
    assert [outcome(r) for r in results] == expected
    assert {report(r).get("fallback") for r in results} >= {"draft_unreachable"}
    streams = counters(cascade.url)["draft_streams"]
    assert streams["failed"] >= 3 and streams["left_alone"] >= 1
