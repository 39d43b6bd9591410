"""The embedded pair in bfloat16 on a card: graphs, all routes, all backends.

With SGLANG_PARSE_TEST_DRY=1 the servers of `fifteen_minutes.sh --dry` run on a CPU.
"""

import os
import re

import pytest
import requests
import torch
from transformers import AutoTokenizer

from benchmarks.models import OTHER_DRAFT_PATH
from sglang_parse.demo.servers import ServerProcess
from sglang_parse.embedded import (
    DRAFT_PATH,
    HEAD_PATH,
    TARGET_PATH,
)
from sglang_parse.embedded.task import make_problems
from tests.support.client import Server, chat_ids

IS_DRY = os.environ.get("SGLANG_PARSE_TEST_DRY") == "1"
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not (IS_DRY or torch.cuda.is_available()), reason="no CUDA device"
    ),
]
ON_CARD = (
    *("--dtype", "bfloat16", "--mem-fraction-static", "0.8"),
    *("--cuda-graph-max-bs-decode", "16"),
)
COMMON = (
    *("--model-path", str(TARGET_PATH)),
    # Few tokens, so that servers of several test workers stand side by side.
    *("--max-total-tokens", "65536", "--max-running-requests", "16"),
    *(() if IS_DRY else ON_CARD),
)
PARSE = (
    *("--speculative-algorithm", "PARSE"),
    *("--speculative-parse-client-options", "all"),
    *("--speculative-draft-model-path", str(DRAFT_PATH)),
    "--no-speculative-parse-adaptive",
)
SERVERS = {
    "default": (),
    # Plain rounds of several steps, planned while the device is a step behind.
    "adaptive": ("--speculative-parse-adaptive",),
    "triton": ("--attention-backend", "triton"),
    "pages": ("--page-size", "16"),
    "two backends": ("--decode-attention-backend", "triton"),
    "fa3": ("--attention-backend", "fa3"),
    "head": (
        *("--speculative-parse-compose", "eagle3"),
        *("--speculative-parse-eagle-model-path", str(HEAD_PATH)),
    ),
    "other tokenizer": ("--speculative-draft-model-path", str(OTHER_DRAFT_PATH)),
    # The second and the third run find their prompts in host memory.
    "hierarchical cache": (
        *("--enable-hierarchical-cache", "--hicache-ratio", "8"),
        *("--max-total-tokens", "1024", "--max-running-requests", "4"),
    ),
}
NUM_PROBLEMS = 16
# Of a start, kernels that are compiled included; a lent machine's call has ten minutes.
BOOT_S = 540.0
# bfloat16 and other batch shapes may turn a near tie over, in an answer or two.
MIN_EQUAL = 14


@pytest.fixture(scope="module")
def prompts():
    tokenizer = AutoTokenizer.from_pretrained(TARGET_PATH)
    problems = make_problems(NUM_PROBLEMS, seed=2024)
    return [chat_ids(tokenizer, p.prompt) for p in problems]


@pytest.fixture(scope="module")
def expected(prompts, tmp_path_factory):
    """Answers of the target alone."""
    log = tmp_path_factory.mktemp("gpu") / "target.log"
    flags = COMMON if IS_DRY else (*COMMON, "--attention-backend", "flashinfer")
    with ServerProcess(flags, "target", log, timeout_s=BOOT_S) as process:
        results = Server(process.url).generate_all(prompts, 4)
    return [r["output_ids"] for r in results]


@pytest.mark.parametrize("name", SERVERS)
def test_server_answers_like_its_target(name, prompts, expected, tmp_path):
    """Red if a pass, a captured draft step or a plain step computes something else."""
    if name == "fa3" and torch.cuda.get_device_capability()[0] != 9:
        pytest.skip("FlashAttention 3 is for Hopper")
    log = tmp_path / f"{name}.log"
    flags = (*COMMON, *PARSE, *SERVERS[name])
    with ServerProcess(flags, name, log, timeout_s=BOOT_S) as process:
        server = Server(process.url)
        exact = server.generate_all(prompts, 4, custom={"parse_mode": "exact"})
        plain = server.generate_all(prompts, 4, custom={"parse_mode": "off"})
        judged = server.generate_all(prompts, 4)
    for results in (exact, plain):
        equal = [r["output_ids"] == e for r, e in zip(results, expected, strict=True)]
        assert sum(equal) >= MIN_EQUAL
    kept = sum(r["meta_info"]["parse"][0]["kept_tokens"] for r in judged)
    assert kept > 0.3 * sum(len(r["output_ids"]) for r in judged)
    if IS_DRY:
        return
    text = log.read_text()
    assert "Capture draft decode CUDA graph end" in text
    assert "Capture target decode CUDA graph end" in text


def test_sampled_answers_and_grammars_are_served(prompts, tmp_path):
    """Red if sampling many rows at once, or the masks of a grammar, fail on a card, or
    a fast path of the server is off."""
    log = tmp_path / "sampled.log"
    with ServerProcess((*COMMON, *PARSE), "sampled", log, timeout_s=BOOT_S) as process:
        server = Server(process.url)
        warm = {"temperature": 0.7, "top_p": 0.9}
        sampled = server.generate_all(prompts, 8, **warm)
        ruled = server.generate_all(prompts, 8, regex="[0-9]{1,4}", **warm)
        info = requests.get(process.url + "/server_info", timeout=60).json()
    assert all(r["output_ids"] for r in sampled)
    assert all(re.fullmatch("[0-9]{1,4}", r["text"].strip()) for r in ruled)
    paths = info["internal_states"][0]["parse"]["paths"]
    assert {name for name, one in paths.items() if one["state"] == "off"} == set()
