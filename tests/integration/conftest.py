"""Real servers of the embedded pair, started once and always stopped.

At most three are alive at a time in each test process: the one used least recently
makes room. With
SGLANG_PARSE_TEST_URLS="target=http://...,parse=http://..." running servers are used
instead of new ones.
"""

import os
import time
from functools import partial

import pytest
from transformers import AutoTokenizer

from benchmarks.models import OTHER_DRAFT_PATH
from sglang_parse.demo.servers import ServerError, ServerProcess
from sglang_parse.embedded import (
    DRAFT_PATH,
    HEAD_PATH,
    TARGET_PATH,
)
from sglang_parse.embedded.task import make_problems
from tests.support.client import CHUNK, Server, chat_ids
from tests.support.made_plugin import write_plugin
from tests.support.other_drafts import (
    OTHER_MARKERS,
    write_permuted_draft,
    write_short_draft,
)
from tests.support.warm_servers import WarmServer

MAX_ALIVE = 3
# Tokens that the draft of a server reads; its target reads 2,048.
SHORT = 96
NUM_PROMPTS = int(os.environ.get("SGLANG_PARSE_TEST_PROMPTS", "16"))
COMMON = (
    *("--model-path", str(TARGET_PATH), "--chunked-prefill-size", str(CHUNK)),
    # Test processes side by side have a few servers each.
    *("--max-total-tokens", "16384", "--skip-server-warmup"),
)
# Requests of tests are looser than their servers; test_limits.py is about the default.
ALGORITHM = (
    *("--speculative-algorithm", "PARSE"),
    *("--speculative-parse-client-options", "all"),
)
PARSE = (*ALGORITHM, "--speculative-draft-model-path", str(DRAFT_PATH))
OTHER = (*ALGORITHM, "--speculative-draft-model-path", str(OTHER_DRAFT_PATH))
EAGLE = (
    *("--speculative-parse-compose", "eagle3"),
    *("--speculative-parse-eagle-model-path", str(HEAD_PATH)),
)
# Two or three long requests fit. SGLang admits too carefully to run out of slots often;
# its own test switch retracts a request every so many rounds.
SMALL_POOL = ("--max-total-tokens", "600", "--page-size", "8")
RETRACTING = {"SGLANG_TEST_RETRACT": "1", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
# The server `full` has neither: it admits whatever prompts fit, and runs out of slots.
FILLING = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "1"}
RETRACTED = ("small", "other", "default")
# Draft phases are short, so that requests take part in passes while others draft on;
# quanta take as long as they may on any machine; and short passes are decode steps. KV
# of slots that are freed is spoiled.
ROLLING = ("default", "head-only")
ROLLING_PLUGIN = """
    from sglang_parse.engine import round
    from sglang_parse.verify.short_passes import ShortPasses
    from tests.support import freed_slots


    def register():
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        engine = "sglang_parse.plugin.worker.ParseWorker.alloc_memory_pool"
        HookRegistry.register(engine, switch_on, HookType.AFTER)
        prewarm = "sglang_parse.plugin.worker.ParseWorker.prewarm_sampling"
        HookRegistry.register(prewarm, freed_slots.poison, HookType.BEFORE)
        bound = "sglang_parse.policy.planner.RoundPlanner._bound_phase"
        HookRegistry.register(bound, shorten, HookType.AFTER)
        run = "sglang_parse.engine.round.RoundEngine.run"
        HookRegistry.register(run, tell_round, HookType.AFTER)
        quantum = "sglang_parse.engine.round.RoundEngine.run_quantum"
        HookRegistry.register(quantum, tell_quantum, HookType.AFTER)
        short = "sglang_parse.verify.short_passes.ShortPasses.run"
        HookRegistry.register(short, tell_short, HookType.AFTER)


    def switch_on(_, worker, **pools):
        ShortPasses.most_rows = 64
        round.QUANTUM_S = 2.0


    def shorten(_, planner, round):
        round.most_draft_steps = min(round.most_draft_steps, 3)
        for r in round.requests[::2]:
            held = r.state.draft
            r.window = min(r.window, max(held.num_left_over + 2, len(held.tokens)))
            r.budgets = {name: min(num, r.window) for name, num in r.budgets.items()}


    def tell_round(done, engine, round):
        print(f"test: a pass of {len(done)} of {len(round)} requests.", flush=True)


    def tell_quantum(rounds, *_):
        print(f"test: a quantum of {len(rounds)} passes.", flush=True)


    def tell_short(output, passes, round, plan):
        print(f"test: a short pass of {plan.num_verify_tokens} rows", flush=True)
"""
# As agents are served.
AGENTS = (
    *("--reasoning-parser", "qwen3", "--tool-call-parser", "qwen25"),
    *("--enable-metrics", "--enable-cache-report"),
)
PAGED = (
    *(*COMMON, *AGENTS, "--page-size", "16"),
    *("--enable-priority-scheduling", "--max-running-requests", "4"),
)
# What SGLang serves only where it is switched on.
MORE = ("--enable-return-hidden-states", "--enable-custom-logit-processor")
FLAGS = {
    "target": (*COMMON, *MORE),
    # Adaptive windows follow measured times, so semantic answers would differ between
    # runs; `default` and the small pool serve with them.
    "parse": (*COMMON, *PARSE, *MORE, "--no-speculative-parse-adaptive"),
    "agents": (*COMMON, *PARSE, *AGENTS, "--no-speculative-parse-adaptive"),
    "agents-target": (*COMMON, *AGENTS),
    "paged": (*PAGED, *PARSE, "--speculative-parse-mode", "exact"),
    "paged-target": PAGED,
    "default": (*COMMON, *PARSE),
    "other": (*COMMON, *OTHER, *EAGLE, "--no-speculative-parse-adaptive"),
    # As rollouts of reinforcement learning ask: ids in, ids out.
    "ids": (
        *COMMON,
        *PARSE,
        "--no-speculative-parse-adaptive",
        "--skip-tokenizer-init",
    ),
    # Nobody can make it lossy: what clients may set is bounded by default. Two
    # processes serve HTTP, and each has to know that.
    "exact": (
        *(*COMMON, "--speculative-algorithm", "PARSE", *PARSE[-2:]),
        *("--speculative-parse-mode", "exact", "--no-speculative-parse-adaptive"),
        *("--tokenizer-worker-num", "2"),
    ),
    # Their drafts are written where the server's log is.
    "permuted": (*COMMON, *ALGORITHM, "--no-speculative-parse-adaptive"),
    "short": (*COMMON, *ALGORITHM, *EAGLE, "--no-speculative-parse-adaptive"),
    "small": (*COMMON, *PARSE, *EAGLE, *SMALL_POOL),
    "full": (
        *(*COMMON, *PARSE, *EAGLE, "--max-total-tokens", "600"),
        *("--schedule-conservativeness", "0.01"),
    ),
    "eagle": (*COMMON, *PARSE, *EAGLE, *MORE, "--no-speculative-parse-adaptive"),
    "head-only": (*COMMON, *ALGORITHM, *EAGLE),
    "no-draft": (*COMMON, *ALGORITHM, "--enable-metrics"),
    "ranks": (
        *(*COMMON, *PARSE, *EAGLE, "--tp", "2"),
        *("--prefill-attention-backend", "torch_native"),
        *("--decode-attention-backend", "parse_torch"),
    ),
    # The ranks have to agree on what a draft in text becomes.
    "other-ranks": (*COMMON, *OTHER, *EAGLE, "--tp", "2"),
}
# Servers that prove their fast paths at start, as users' do; so do those of
# test_fast_paths.py, which sees faults found.
PROVING = ("parse", "default", "ranks")
WRITTEN = {
    "permuted": partial(write_permuted_draft, names=OTHER_MARKERS),
    "short": partial(write_short_draft, most=SHORT),
}


# The real model's file takes longest and comes first. Files that share `target` and
# `parse` follow, the longest of them in front; then files with servers of their own,
# and last what starts none. `make test` hands files to processes in this order, so each
# process starts few servers twice.
SHARING = (
    *("behaviour", "equivalence", "fuzz", "client_texts", "openai", "requests"),
    *("cache", "scores", "programs", "frontend", "documents"),
)


def pytest_collection_modifyitems(items):
    for item in items:
        if "/tests/integration/" in str(item.path):
            item.add_marker(pytest.mark.server)
    items.sort(key=place_of)


def place_of(item):
    """Where a test comes among all. Within a file, tests that need another server than
    `target` and `parse` come last."""
    if "/tests/real/" in str(item.path):
        return -1, False
    if item.get_closest_marker("server") is None:
        return len(SHARING) + 1, False
    name = item.path.stem.removeprefix("test_")
    asked = getattr(item, "callspec", None) and item.callspec.params.get("server")
    is_last = bool(item.get_closest_marker("own_server")) or asked not in (
        None,
        "parse",
    )
    return SHARING.index(name) if name in SHARING else len(SHARING), is_last


class ServerPool:
    """Servers by name, started when first asked for."""

    def __init__(self, log_dir):
        self.log_dir = log_dir
        self.rolling_plugin = write_plugin(
            log_dir / "plugin", "parse_rolling", ROLLING_PLUGIN
        )
        self.alive: dict[str, ServerProcess] = {}
        given = os.environ.get("SGLANG_PARSE_TEST_URLS", "")
        self.given = dict(pair.split("=", 1) for pair in given.split(",") if pair)

    def start(self, name: str) -> None:
        if name in self.alive or name in self.given:
            return
        while len(self.alive) >= MAX_ALIVE:
            self.stop(next(iter(self.alive)))
        with pytest.MonkeyPatch.context() as environment:
            for key, value in RETRACTING.items() if name in RETRACTED else ():
                environment.setenv(key, value)
            for key, value in FILLING.items() if name == "full" else ():
                environment.setenv(key, value)
            if name in ROLLING:
                environment.setenv("PYTHONPATH", str(self.rolling_plugin), prepend=":")
            flags = FLAGS[name]
            if name in WRITTEN:
                draft = WRITTEN[name](self.log_dir / name)
                flags = (*flags, "--speculative-draft-model-path", str(draft))
            if "PARSE" in flags and name not in PROVING:
                flags = (*flags, "--speculative-parse-prove", "off")
            process = WarmServer(flags, name, self.log_dir / f"{name}.log")
        self.alive[name] = process
        process.start()

    def get(self, name: str) -> Server:
        if name in self.given:
            return Server(self.given[name])
        if name in self.alive:
            try:
                self.alive[name].check_alive()
            except ServerError:
                self.stop(name)  # an earlier test has killed it, and failed
                log = self.log_dir / f"{name}.log"
                log.rename(log.with_suffix(f".{time.time_ns()}.log"))
        self.start(name)
        process = self.alive[name] = self.alive.pop(name)
        if not process.ready_s:
            process.wait_ready()
        return Server(process.url)

    def stop(self, name: str) -> None:
        self.alive.pop(name).stop()

    def log(self, name: str) -> str:
        """What a server has written."""
        return (self.log_dir / f"{name}.log").read_text()


@pytest.fixture(scope="session")
def pool(tmp_path_factory):
    servers = ServerPool(tmp_path_factory.mktemp("servers"))
    try:
        # Side by side: booting is mostly imports.
        servers.start("target")
        servers.start("parse")
        yield servers
    finally:
        for name in list(servers.alive):
            servers.stop(name)


@pytest.fixture
def target(pool):
    return pool.get("target")


@pytest.fixture
def parse(pool):
    server = pool.get("parse")
    yield server
    assert server.is_alive(), "the test left the PARSE server dead"


@pytest.fixture(scope="session")
def tokenizer():
    return AutoTokenizer.from_pretrained(TARGET_PATH)


@pytest.fixture(scope="session")
def prompts(tokenizer):
    """Token ids of prompts of the embedded task, chat template applied."""
    problems = make_problems(NUM_PROMPTS, seed=2024)
    return [chat_ids(tokenizer, p.prompt) for p in problems]
