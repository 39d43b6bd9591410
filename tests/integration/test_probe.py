"""Verdicts from hidden states on a real server, held to plain prefills elsewhere."""

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM

from benchmarks.train_probe.collect import read_pairs
from benchmarks.train_probe.save import save_probe
from sglang_parse.embedded import TARGET_PATH
from sglang_parse.judging.prompt import build_judge_prompt
from sglang_parse.options.table import DEFAULT_JUDGE_SUFFIX
from sglang_parse.probe.linear_probe import Learnt, Probe
from sglang_parse.probe.target_fingerprint import fingerprint
from tests.integration.conftest import COMMON, EAGLE, PARSE
from tests.support.client import Server, report
from tests.support.warm_servers import WarmServer

LAYERS = (5, 12, 20)  # one of them is a layer of the EAGLE-3 head
SIZE = 128


@pytest.fixture(scope="module")
def model():
    torch.set_num_threads(1)  # beside a server more threads only wait
    return LlamaForCausalLM.from_pretrained(TARGET_PATH, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def judge():
    tokenizer = AutoTokenizer.from_pretrained(TARGET_PATH)
    return build_judge_prompt(tokenizer, DEFAULT_JUDGE_SUFFIX, (("Yes", "No"),))


def states_of(model, ids):
    """What a probe reads at the last of these tokens, by one plain forward."""
    with torch.inference_mode():
        hidden = model(torch.tensor([ids]), output_hidden_states=True).hidden_states
    return torch.cat([hidden[layer][0, -1] for layer in (*LAYERS, -1)])


@pytest.fixture(scope="module")
def probe(model, judge, prompts):
    """Random weights of a size that gives all kinds of scores."""
    found = torch.stack([states_of(model, ids[:k]) for ids in prompts[:8]
                         for k in range(8, len(ids), 8)])  # fmt: skip
    made = torch.Generator().manual_seed(4)
    weight = torch.randn(found.shape[1], generator=made) / found.std(0)
    weight = 1.5 * weight / (found @ weight).std()
    learnt = Learnt(
        fingerprint(str(TARGET_PATH)), DEFAULT_JUDGE_SUFFIX, judge.suffix, 0.5
    )
    bias = -(found @ weight).mean()
    return Probe(learnt, LAYERS, SIZE, {"step": 0.0}, weight, bias)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The probe, the server's log, and the file its pairs go to."""
    return tmp_path_factory.mktemp("probe")


@pytest.fixture(scope="module")
def server(probe, folder):
    save_probe(probe, folder / "probe.safetensors")
    flags = (
        *(*COMMON, *PARSE, *EAGLE, "--no-speculative-parse-adaptive"),
        *("--speculative-parse-probe", str(folder / "probe.safetensors")),
        *("--speculative-parse-probe-check", "0"),
        *("--speculative-parse-probe-collect", str(folder / "pairs")),
    )
    with WarmServer(flags, "probe", folder / "probe.log") as process:
        yield Server(process.url)


def kept(prompt, result):
    """(prefix, score, judge) of the boundaries whose segments were kept by verdict."""
    output = result["output_ids"]
    for span in report(result)["segments"]:
        if span["outcome"] == "kept" and span["score"] is not None:
            end = span["start"] + len(span["token_ids"])
            yield [*prompt, *output[:end]], span["score"], span["judge"]


def test_scores_are_read_from_the_row_of_the_boundary(server, model, probe, prompts):
    """Red if the state of another token, layer or request is read, or if the states of
    a pass over many requests differ from those of a plain prefill."""
    custom = {"parse_judge": "probe", "parse_report": True}
    results = server.generate_all(prompts[:10], 10, custom=custom)
    num = 0
    for prompt, result in zip(prompts, results, strict=False):
        for prefix, score, by in kept(prompt, result):
            expected = probe.scores(states_of(model, prefix)[None]).item()
            assert by == "probe" and score == pytest.approx(expected, abs=1e-4)
            num += 1
        assert report(result)["probe_segments"] == report(result)["judged_segments"]
    assert num > 30


@pytest.mark.combines("probe", "head")
def test_exact_mode_beside_a_probe_equals_the_target(server, target, prompts):
    """Red if the head reads the layers of the probe, or prefills lose their states."""
    results = server.generate_all(prompts[:8], 8, custom={"parse_mode": "exact"})
    expected = target.generate_all(prompts[:8], 8)
    for ours, theirs in zip(results, expected, strict=True):
        assert ours["output_ids"] == theirs["output_ids"]
    counts = [report(r) for r in results]
    kept_tokens = sum(c["eagle_kept_tokens"] for c in counts)
    assert kept_tokens > 0.3 * sum(c["eagle_draft_tokens"] for c in counts)


@pytest.mark.parametrize(
    "custom", [{"parse_threshold": 0.7}, {"parse_segmenter": "line"}]
)
def test_a_probe_judges_nothing_it_was_not_learnt_for(server, prompts, custom):
    """Red if a probe is read under another threshold or segmenter."""
    (result,) = server.generate_all(prompts[:1], 1, custom=custom)
    assert report(result)["probe_segments"] == 0
    with pytest.raises(Exception, match="parse_judge is 'probe'"):
        server.generate_all(prompts[:1], 1, custom={**custom, "parse_judge": "probe"})


def test_pairs_are_written(server, folder, prompts):
    """Red if nothing can be learnt from a server's pairs."""
    server.generate_all(prompts[:2], 2, custom={"parse_judge": "suffix"})
    found = read_pairs(folder / "pairs", {})
    assert len(found.pairs.scores) > 4 and found.layers == LAYERS
    assert found.learnt.question == DEFAULT_JUDGE_SUFFIX
