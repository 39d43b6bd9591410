"""The real model's servers: the target alone, and PARSE in exact mode.

They start side by side, once, and only where `sglang-parse models --real` has run. One
more has every other kind of draft.
"""

import os

import pytest
from transformers import AutoTokenizer

from benchmarks.models import OTHER_DRAFT_PATH
from benchmarks.real_model import built_models
from benchmarks.real_model.prompts import conversations
from sglang_parse.demo.servers import running
from tests.support.client import Server
from tests.support.warm_servers import WarmServer

NUM_PROMPTS = int(os.environ.get("SGLANG_PARSE_TEST_PROMPTS", "24"))
# Of those, how many are asked one at a time: of each of the eight kinds equally many.
NUM_ALONE = int(os.environ.get("SGLANG_PARSE_TEST_PROMPTS", "8"))
# Of those, how many are asked with every other kind of draft.
NUM_OTHER = int(os.environ.get("SGLANG_PARSE_TEST_PROMPTS", "24"))
# Characters of a prompt that are read, from its end: 4,000 tokens take a core a minute.
MOST_CHARACTERS = 10**6 if "SGLANG_PARSE_TEST_PROMPTS" in os.environ else 5000
THREADS = int(os.environ.get("OMP_NUM_THREADS", os.cpu_count() or 1))
OTHER_CONTEXT = 2048  # what the draft with another tokenizer reads
POOL = (
    *("--max-total-tokens", "24576", "--max-running-requests", "16"),
    *("--chunked-prefill-size", "1024", "--skip-server-warmup"),
)
# To prove fast paths takes a minute here, and integration tests do.
UNPROVEN = ("--speculative-parse-prove", "off")
TOOL_CALLS = ("--tool-call-parser", "qwen25")


def pytest_collection_modifyitems(items):
    missing = built_models() is None and not os.environ.get("SGLANG_PARSE_REAL_URLS")
    for item in items:
        if "/tests/real/" not in str(item.path):
            continue
        item.add_marker(pytest.mark.real)
        if missing:
            reason = "no real model; `sglang-parse models --real` fetches it"
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="module")
def models():
    return built_models()


@pytest.fixture(scope="module")
def servers(models, tmp_path_factory):
    """By name. With SGLANG_PARSE_REAL_URLS="target=URL,parse=URL" running ones."""
    if given := os.environ.get("SGLANG_PARSE_REAL_URLS"):
        yield {k: Server(v) for k, v in (pair.split("=") for pair in given.split(","))}
        return
    target = ("--model-path", str(models.target), *POOL, *TOOL_CALLS)
    parse = ("--speculative-algorithm", "PARSE", "--speculative-parse-mode", "exact")
    parse += UNPROVEN
    # On a busy machine measured times may say that no draft pays.
    parse += ("--no-speculative-parse-adaptive", "--speculative-parse-window", "4")
    draft = ("--speculative-draft-model-path", str(models.draft))
    head = ("--speculative-parse-compose", "eagle3")
    head += ("--speculative-parse-eagle-model-path", str(models.head))
    logs = tmp_path_factory.mktemp("servers")
    flags = {"target": target, "parse": (*target, *parse, *draft, *head)}
    processes = {
        name: WarmServer(args, name, logs / f"{name}.log", num_threads=THREADS)
        for name, args in flags.items()
    }
    with running(list(processes.values())):
        yield {name: Server(p.url) for name, p in processes.items()}


@pytest.fixture(scope="module")
def target(servers):
    return servers["target"]


@pytest.fixture(scope="module")
def parse(servers):
    return servers["parse"]


@pytest.fixture(scope="module")
def drafters(servers, models, tmp_path_factory):
    """PARSE with copies, a draft server, which is the target's, and a draft model with
    another tokenizer, which knows nothing of these texts."""
    if "drafters" in servers:
        yield servers["drafters"]
        return
    flags = (
        *("--model-path", str(models.target), *POOL),
        *("--speculative-algorithm", "PARSE", "--no-speculative-parse-adaptive"),
        *UNPROVEN,
        *("--speculative-parse-drafters", "ngram,remote,model"),
        *("--speculative-parse-draft-url", f"{servers['target'].url}/v1"),
        *("--speculative-draft-model-path", str(OTHER_DRAFT_PATH)),
        *("--context-length", str(OTHER_CONTEXT)),
    )
    log = tmp_path_factory.mktemp("drafters") / "drafters.log"
    with WarmServer(flags, "drafters", log, num_threads=THREADS) as process:
        yield Server(process.url)


@pytest.fixture(scope="module")
def tokenizer(models):
    return AutoTokenizer.from_pretrained(models.target)


@pytest.fixture(scope="module")
def prompts(tokenizer):
    """Token ids of conversations of eight kinds, chat template applied."""
    asked = conversations(NUM_PROMPTS)
    for *_, last in asked:
        last["content"] = last["content"][-MOST_CHARACTERS:]
    texts = [
        tokenizer.apply_chat_template(m, tokenize=False, add_generation_prompt=True)
        for m in asked
    ]
    return [tokenizer.encode(t, add_special_tokens=False) for t in texts]
