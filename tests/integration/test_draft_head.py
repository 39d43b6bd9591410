"""Guesses of a draft's tokens on real servers, by a head of the draft model and by
runs of tokens seen before: the same drafts in fewer steps."""

from __future__ import annotations

import os
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest

from sglang_parse.embedded import DRAFT_HEAD_PATH
from sglang_parse.embedded.task import make_problems
from tests.integration.conftest import COMMON, PARSE
from tests.support.client import Server, chat_ids, outcome, report
from tests.support.made_plugin import write_plugin
from tests.support.warm_servers import WarmServer

pytestmark = pytest.mark.own_server
NUM = int(os.environ.get("SGLANG_PARSE_TEST_PROMPTS", "24"))
FLAGS = (*COMMON, *PARSE, "--max-running-requests", "16")
HEAD = (
    *("--speculative-parse-draft-compose", "eagle3"),
    *("--speculative-parse-draft-eagle-model-path", str(DRAFT_HEAD_PATH)),
)
# Decode steps are captured ones, and the log tells of each that a model which drafts
# takes. It tells what the head holds for likeliest behind a text, which is shown
# without its first token. What a draft phase writes by guesses is written plainly once
# more, on the same KV, and the log tells of both: which requests draft together hangs
# on the clock.
PLUGIN = """
    import sys
    from dataclasses import replace

    import pytest

    sys.path.append({root!r})


    def register():
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        backends = "sglang_parse.plugin.worker.ParseWorker.init_attention_backends"
        HookRegistry.register(backends, install, HookType.BEFORE)


    def install(worker):
        from sglang_parse.drafting.draft_head import DraftHead
        from sglang_parse.drafting.draft_model import DraftModel
        from tests.support import cpu_graphs

        cpu_graphs.install()
        replay, write = cpu_graphs.ReplayBackend.replay, DraftModel._write
        follow, texts = DraftHead.follow, {{}}

        def with_hints(self, read, output, table):
            hints = follow(self, read, output, table)
            for (row, _, place, tokens), hint in zip(read, hints, strict=True):
                texts[row] = [*texts.get(row, ())[:place], *tokens]
                print("test: a hint", int(hint.token), *texts[row], flush=True)
            return hints

        def told(self, *args, **kwargs):
            runner = self.runner.model_runner
            if runner.is_draft_worker:
                print(f"test: a step of {{type(runner.model).__name__}}", flush=True)
            return replay(self, *args, **kwargs)

        def twice(self, writing, table, sampling_info, phase, by_head):
            rest = table, sampling_info
            guessed = by_head or (self.guesses is not None and self.guesses.pays)
            lanes = write(self, writing, *rest, phase, by_head)
            num = sum(len(lane.tokens) for lane in lanes)
            print(f"test: {{num}} tokens", flush=True)
            if guessed and {compares}:
                with pytest.MonkeyPatch.context() as plainly:
                    plainly.setattr(self, "head", None)
                    plainly.setattr(self, "guesses", None)
                    again = write(self, writing, *rest, whole(phase, lanes), 0)
                print(f"test: {{len(lanes)}} compared", flush=True)
                for lane, plain in zip(lanes, again, strict=True):
                    num = min(len(lane.tokens), len(plain.tokens))
                    both = lane.tokens[:num], plain.tokens[:num]
                    if both[0] != both[1] or lane.ended > plain.ended:
                        print(f"test: differ {{both}}", flush=True)
            return lanes

        cpu_graphs.ReplayBackend.replay = told
        DraftHead.follow = with_hints
        DraftModel._write = twice


    def whole(phase, lanes):
        most = max(lane.num_forwarded for lane in lanes)
        return replace(phase, most_steps=most, most_idle=1e9, is_due=lambda: False)
"""


@pytest.fixture(scope="module")
def prompts(tokenizer):
    return [chat_ids(tokenizer, p.prompt) for p in make_problems(NUM, seed=2024)]


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    """Servers by name: without guesses, with a head, and two that write twice what they
    write by guesses. Adaptive windows would follow measured times."""
    folder, found = tmp_path_factory.mktemp("head"), {}
    guessers = {
        "without": (*HEAD[:1], "none"),
        "with": HEAD,
        "twice": HEAD,
        "twice-by-runs": (*HEAD[:1], "ngram"),
    }
    for name, flags in guessers.items():
        source = PLUGIN.format(
            root=str(Path(__file__).parents[2]), compares=name.startswith("twice")
        )
        plugin = write_plugin(folder / f"{name}-plugin", "parse_told", source)
        with pytest.MonkeyPatch.context() as environment:
            environment.setenv("PYTHONPATH", str(plugin), prepend=":")
            all_flags = (*FLAGS, *flags, "--no-speculative-parse-adaptive")
            found[name] = WarmServer(all_flags, name, folder / f"{name}.log")
    with ExitStack() as running:
        for process in found.values():
            running.enter_context(process)
        yield {
            name: (Server(process.url), process.log_path)
            for name, process in found.items()
        }


def told(log: Path) -> list[list[str]]:
    """The words of each of the plugin's lines."""
    lines = log.read_text().splitlines()
    return [line.split()[1:] for line in lines if line.startswith("test: ")]


def draft_of(result) -> tuple:
    """What became of a draft: all that two equal drafts agree on."""
    one = report(result)
    segments = [(s["text"], s["outcome"]) for s in one["segments"]]
    return outcome(result), one["drafted_by"], segments


def test_answers_are_those_without_the_head(served, prompts):
    """Red if a draft, its verdicts or the answer depend on the head."""
    found = [
        served[name][0].generate_all(prompts[:12], 1, custom={"parse_report": True})
        for name in ("without", "with")
    ]
    without, with_head = ([draft_of(r) for r in results] for results in found)
    assert with_head == without


@pytest.mark.parametrize("name", ["twice", "twice-by-runs"])
@pytest.mark.parametrize("concurrency", [1, 16])
def test_drafts_are_those_of_the_plain_loop(
    served, prompts, tokenizer, name, concurrency
):
    """Red if a token that the draft model would not have written is drafted."""
    server, log = served[name]
    asked = prompts[: max(8, NUM if concurrency > 1 else NUM // 3)]
    if name == "twice-by-runs" and concurrency == 1:  # pays after about 30 answers
        warm_up = [chat_ids(tokenizer, p.prompt) for p in make_problems(40, seed=7)]
        server.generate_all(warm_up, 8)
    before = len(told(log))
    server.generate_all(asked, concurrency)
    words = told(log)[before:]
    assert not [w for w in words if w[0] == "differ"]
    assert sum(int(w[0]) for w in words if w[1:] == ["compared"]) >= len(asked)


def test_the_head_halves_the_drafts_steps(served, prompts):
    """Red if the trained head hardly agrees, as where it reads other hidden states than
    it was trained on, or if its own steps, or the draft's, are not captured."""
    used = {}
    for name in ("without", "with"):
        server, log = served[name]
        before = len(told(log))
        server.flush()
        server.generate_all(prompts[:10], 1)
        words = told(log)[before:]
        num = sum(int(w[0]) for w in words if w[1:] == ["tokens"])
        steps = Counter(w[-1] for w in words if w[:2] == ["a", "step"])
        assert num > 300
        used[name] = {model: count / num for model, count in steps.items()}
    assert used["without"]["LlamaForCausalLM"] > 0.9
    assert used["with"]["LlamaForCausalLM"] < 0.5
    assert used["with"]["LlamaForCausalLMEagle3"] > 0
