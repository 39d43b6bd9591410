"""A head for multi-token prediction in the draft's own checkpoint: the same drafts in
fewer steps of the draft, which SGLang would itself take for that head."""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.test_draft_head import PLUGIN, told
from tests.integration.test_models import ON_REQUEST, ids_of, prompts_of
from tests.support.made_plugin import write_plugin
from tests.support.tiny_engine import TinyEngine
from tests.support.tiny_models import FAMILIES
from tests.support.tiny_mtp import NAMES, build_with_mtp

FLAGS = (
    *("--speculative-algorithm", "PARSE", "--no-speculative-parse-adaptive"),
    *("--speculative-parse-client-options", "all"),
    *("--speculative-parse-segmenter", "fixed:8", "--chunked-prefill-size", "48"),
    *("--max-total-tokens", "4096", "--max-running-requests", "16"),
)
# Every draft is kept, so that an answer is mostly the draft's.
WHOLE = {"parse_threshold": 0.0, "parse_window": 24, "parse_report": True}
LENGTH = {"max_new_tokens": 60}
NUM = int(os.environ.get("SGLANG_PARSE_TEST_PROMPTS", "6"))


@pytest.fixture(scope="module", params=sorted(set(NAMES) - ON_REQUEST))
def served(request, tmp_path_factory):
    """Engines by name, with their logs: without the head, and with it, where each draft
    is written twice; and the draft with its head in plain torch."""
    folder, found = tmp_path_factory.mktemp(request.param), {}
    FAMILIES["llama"].build(folder / "target")
    reference = build_with_mtp(request.param, folder / "draft")
    for name, compose in (("without", "none"), ("twice", "mtp")):
        source = PLUGIN.format(
            root=str(Path(__file__).parents[2]), compares=name == "twice"
        )
        plugin = write_plugin(folder / f"{name}-plugin", "parse_told", source)
        engine = TinyEngine(
            [
                *("--model-path", str(folder / "target"), *FLAGS),
                *("--speculative-draft-model-path", str(folder / "draft")),
                *("--speculative-parse-draft-compose", compose),
            ],
            log=str(folder / name),
            environment={"PYTHONPATH": str(plugin)},
            wait=False,
        )
        found[name] = engine, folder / f"{name}0"
    try:
        for engine, _ in found.values():
            engine.wait()
        yield found, reference
    finally:
        for engine, _ in found.values():
            engine.close()


def test_answers_are_those_without_the_head(served):
    """Red if a draft, its verdicts or the answer depend on the head, or the draft is
    not the model of its checkpoint."""
    prompts, found = prompts_of(4), []
    for engine, log in served[0].values():
        answers = engine.run(prompts, 1, custom=WHOLE, **LENGTH)
        models = {w[-1] for w in told(log) if w[:2] == ["a", "step"]}
        found.append((ids_of(answers), [a.report["drafted_by"] for a in answers]))
        assert {m.removesuffix("NextN") for m in models} == {min(models, key=len)}
    assert found[0] == found[1]
    assert all(list(by) == ["model"] and by["model"] > 50 for by in found[0][1])


@pytest.mark.parametrize("concurrency", [1, 16])
def test_drafts_are_those_of_the_plain_loop(served, concurrency):
    """Red if a token that the draft model would not have written is drafted, or if the
    head saves no steps."""
    engine, log = served[0]["twice"]
    before = len(told(log))
    engine.run(prompts_of(NUM, seed=7), concurrency, custom=WHOLE, **LENGTH)
    words = told(log)[before:]
    assert not [w for w in words if w[0] == "differ"]
    assert sum(int(w[0]) for w in words if w[1:] == ["compared"]) >= NUM
    num = sum(int(w[0]) for w in words if w[1:] == ["tokens"])
    steps = Counter(w[-1] for w in words if w[:2] == ["a", "step"])
    (model,) = {name.removesuffix("NextN") for name in steps}
    assert steps[f"{model}NextN"] > 0
    # With one request, a token of what is written once more takes a step.
    assert concurrency > 1 or steps[model] - num < 0.9 * num


def test_the_head_sees_what_it_was_made_for(served):
    """Red if the head is shown another state, token or place of the draft than the
    reference: it would hold other tokens for likeliest."""
    engines, reference = served
    engine, log = engines["twice"]
    found = []
    for prompt in prompts_of(2, seed=11):
        before = len(told(log))
        engine.run([prompt], 1, custom=WHOLE, **LENGTH)
        for words in told(log)[before:]:
            if words[1] == "hint":
                likeliest, *text = words[2:]
                ids = [prompt[0], *map(int, text)]
                states = reference.final_states(ids)[:-1]
                likely, _ = reference.forward(ids[1:], states)
                found.append(int(likeliest) == int(likely[-1]))
    assert len(found) > 30 and sum(found) > 0.95 * len(found)
