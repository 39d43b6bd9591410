"""Replicas behind one port (`--dp-size`), and ranks on two nodes (`--nnodes`)."""

import os

import pytest
import requests

from sglang_parse.demo.servers import HOST, free_port, running
from tests.integration.conftest import COMMON, PARSE
from tests.support.client import Server, report
from tests.support.warm_servers import WarmServer

NUM_PROMPTS = 6
LENGTH = 64
SCALE = "SGLANG_PARSE_TEST_SCALE"
STEADY = "--no-speculative-parse-adaptive"


@pytest.fixture(scope="module")
def expected(pool, prompts):
    """The target's own answers, and where verdicts fail, the same by PARSE."""
    target = pool.get("target").generate_all(
        prompts[:NUM_PROMPTS], 4, max_new_tokens=LENGTH
    )
    return [r["output_ids"] for r in target]


def answers(server, prompts, **custom):
    return server.generate_all(
        prompts[:NUM_PROMPTS], 4, custom=custom, max_new_tokens=LENGTH
    )


def check_exact_and_judged(server, prompts, expected):
    """Exact answers are the target's; judged ones keep drafted segments."""
    for mode in ("exact", "off"):
        got = answers(server, prompts, parse_mode=mode)
        assert [r["output_ids"] for r in got] == expected
    judged = answers(server, prompts, parse_exact_tail=False, parse_threshold=0.0)
    assert all(report(r)["mode"] == "semantic" for r in judged)
    assert sum(report(r)["kept_tokens"] for r in judged) > NUM_PROMPTS
    assert sum(report(r)["judged_segments"] for r in judged) > NUM_PROMPTS


def samples(url, name):
    """(labels, value) of a metric."""
    from prometheus_client.parser import text_string_to_metric_families

    text = requests.get(url + "/metrics", timeout=60).text
    return [
        (sample.labels, sample.value)
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.name == name
    ]


def counted(url):
    """Finished requests by replica; SGLang's own at start-up are among them."""
    found = {}
    for labels, value in samples(url, "sglang:parse_requests_total"):
        rank = labels["dp_rank"]
        found[rank] = found.get(rank, 0) + value
    return found


@pytest.mark.skipif(SCALE not in os.environ, reason=f"{SCALE} starts two replicas")
def test_two_replicas(expected, prompts, tmp_path):
    """Red if a replica answers otherwise than the target, or its requests are not
    counted beside the other's."""
    flags = (*COMMON, *PARSE, STEADY, "--dp-size", "2", "--enable-metrics")
    with WarmServer(flags, "replicas", tmp_path / "log") as process:
        server = Server(process.url)
        before = counted(process.url)
        check_exact_and_judged(server, prompts, expected)
        by_rank = counted(process.url)
        assert set(by_rank) == {"0", "1"}
        num_requests = sum(by_rank.values()) - sum(before.values())
        assert num_requests == 3 * NUM_PROMPTS
        info = requests.get(process.url + "/server_info", timeout=60).json()
        states = [state["parse"]["requests"] for state in info["internal_states"]]
        served = sorted(sum(one.values()) for one in states)
        assert served == sorted(by_rank.values())
        assert served[0] > 1


@pytest.mark.skipif(SCALE not in os.environ, reason=f"{SCALE} starts two nodes")
def test_two_nodes(expected, prompts, tmp_path):
    """Red if ranks of two nodes disagree, which hangs or changes an answer."""
    together = (
        *(*COMMON, *PARSE, "--tp", "2", "--nnodes", "2"),
        *("--dist-init-addr", f"{HOST}:{free_port()}"),
    )
    nodes = [
        WarmServer((*together, "--node-rank", str(i)), f"node{i}", tmp_path / f"{i}")
        for i in range(2)
    ]
    with running(nodes):
        check_exact_and_judged(Server(nodes[0].url), prompts, expected)
