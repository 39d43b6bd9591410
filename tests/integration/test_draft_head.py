"""A head of the draft model on real servers: the same drafts in fewer steps."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sglang_parse.embedded import DRAFT_HEAD_PATH
from sglang_parse.embedded.task import make_problems
from tests.integration.conftest import COMMON, PARSE
from tests.support.client import Server, chat_ids, outcome, report
from tests.support.made_plugin import write_plugin
from tests.support.warm_servers import WarmServer

pytestmark = pytest.mark.own_server
NUM = int(os.environ.get("SGLANG_PARSE_TEST_PROMPTS", "50"))
FLAGS = (*COMMON, *PARSE, "--max-running-requests", "16")
HEAD = (
    *("--speculative-parse-draft-compose", "eagle3"),
    *("--speculative-parse-draft-eagle-model-path", str(DRAFT_HEAD_PATH)),
)
# Decode steps are captured ones. The log tells of each step that the draft takes, and
# of the tokens that it writes.
PLUGIN = """
    import sys

    sys.path.append({root!r})


    def register():
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        backends = "sglang_parse.plugin.worker.ParseWorker.init_attention_backends"
        HookRegistry.register(backends, install, HookType.BEFORE)
        propose = "sglang_parse.drafting.draft_model.DraftModel.propose"
        HookRegistry.register(propose, tell_tokens, HookType.AFTER)


    def install(worker):
        from tests.support import cpu_graphs

        cpu_graphs.install()
        replay = cpu_graphs.ReplayBackend.replay

        def told(self, *args, **kwargs):
            runner = self.runner.model_runner
            if runner.is_draft_worker:
                print(f"test: a step of {{type(runner.model).__name__}}", flush=True)
            return replay(self, *args, **kwargs)

        cpu_graphs.ReplayBackend.replay = told


    def tell_tokens(done, *args, **kwargs):
        print(f"test: {{sum(map(len, done.tokens))}} tokens", flush=True)
"""


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [chat_ids(tokenizer, p.prompt) for p in make_problems(NUM, seed=2024)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """By flags, a server and its log; one after the other, and none is started twice.
    Adaptive windows would follow measured times."""
    folder = tmp_path_factory.mktemp("head")
    source = PLUGIN.format(root=str(Path(__file__).parents[2]))
    plugin, found = write_plugin(folder / "plugin", "parse_told", source), {}
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(plugin), prepend=":")
        for name, flags in (
            ("without", ("--speculative-parse-draft-compose", "none")),
            ("with", HEAD),
        ):
            all_flags = (*FLAGS, *flags, "--no-speculative-parse-adaptive")
            found[name] = WarmServer(all_flags, name, folder / f"{name}.log")
    with found["without"], found["with"]:
        yield {
            name: (Server(process.url), process.log_path)
            for name, process in found.items()
        }


def draft_of(result) -> tuple:
    """What a draft became: all that two equal drafts agree on."""
    told = report(result)
    segments = [(s["text"], s["outcome"]) for s in told["segments"]]
    return outcome(result), told["drafted_by"], segments


@pytest.mark.parametrize("concurrency", [1, 16])
def test_drafts_are_those_without_the_head(served, prompts, concurrency):
    """Red if a draft, its verdicts or the answer depend on the head."""
    custom = {"parse_report": True}
    found = {
        name: server.generate_all(prompts, concurrency, custom=custom)
        for name, (server, _) in served.items()
    }
    with_head, without = (map(draft_of, found[n]) for n in ("with", "without"))
    assert list(with_head) == list(without)


def test_the_head_halves_the_drafts_steps(served, prompts):
    """Red if the trained head hardly agrees, as where it reads other hidden states than
    it was trained on, or if its own steps, or the draft's, are not captured."""
    used = {}
    for name, (server, log) in served.items():
        at = len(log.read_text())
        server.flush()
        server.generate_all(prompts[:10], 1)
        text = log.read_text()[at:]
        words = [line.split()[1:] for line in text.splitlines() if "test: " in line]
        num = sum(int(w[0]) for w in words if w[1:] == ["tokens"])
        steps = [w[-1] for w in words if w[:2] == ["a", "step"]]
        assert num > 300
        used[name] = {m: steps.count(m) / num for m in sorted({*steps})}
    assert used["without"]["LlamaForCausalLM"] > 0.9
    assert used["with"]["LlamaForCausalLM"] < 0.5
