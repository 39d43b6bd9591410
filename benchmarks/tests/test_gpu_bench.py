# ruff: noqa: E402
"""The GPU benchmark's bookkeeping: shapes, resuming, floors and tables."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from benchmarks.gpu import answers, plot
from benchmarks.gpu.arms import JUDGE_FOLDER, arms_of, servers_of, threshold_for
from benchmarks.gpu.pairs import (
    CONFIGS,
    HEADED,
    PAIRS,
    Shape,
    head_folder,
    shape_of,
)
from benchmarks.gpu.pinned_judge.parse_path_switch import switched
from benchmarks.gpu.pinned_judge.parse_pinned_judge import PinnedJudge
from benchmarks.gpu.records import Records
from benchmarks.gpu.serve import environment, parser
from sglang_parse.judging.decide import count_valid_segments
from sglang_parse.judging.judges import checked_judge, checked_scores
from sglang_parse.sgl.fast_paths import OFF, PROVEN, FastPaths

# Parameters without norms, from the model cards: 32.8B, 1.7B, 0.6B, 8.0B, 1.24B.
BILLIONS = {
    "qwen3-32b": 32.76,
    "qwen3-1.7b": 1.72,
    "qwen3-0.6b": 0.596,
    "llama-3.1-8b": 8.03,
    "llama-3.2-1b": 1.236,
}


@pytest.mark.parametrize("name", BILLIONS)
def test_shapes_have_the_published_size(name):
    """Red if a config is not of the model it is called after."""
    config = CONFIGS[name]
    shape = shape_of(config, itemsize=2)
    embeddings = shape.head_params * (1 if config["tie_word_embeddings"] else 2)
    billions = (shape.linear_params + embeddings) / 1e9
    assert billions == pytest.approx(BILLIONS[name], rel=0.005)


def test_heads_fit_their_targets(tmp_path):
    """Red if a head is of another width or vocabulary than its target, which PARSE and
    SGLang refuse, or has as many layers."""
    assert set(BILLIONS) | {f"{name}-eagle3" for name in HEADED} == set(CONFIGS)
    for name in HEADED:
        spec = next(p for p in PAIRS.values() if p.target == name)
        folder = head_folder(spec, tmp_path)
        head = json.loads((folder / "config.json").read_text())
        for key in ("hidden_size", "vocab_size"):
            assert head[key] == CONFIGS[name][key]
        assert head["num_hidden_layers"] == 1
        assert head["architectures"] == ["LlamaForCausalLMEagle3"]
        assert head["draft_vocab_size"] < head["vocab_size"]


@pytest.mark.parametrize("pair", PAIRS)
def test_arms_have_what_their_names_say(pair, tmp_path):
    """Red if an arm has a draft model, an accept length or a judge that is not its own,
    or rounds that rewrite a segment are most of what a pinned arm measures."""
    argv = ["--pair", pair, "--out", str(tmp_path), "--models", str(tmp_path)]
    arms = {arm.name: arm for arm in arms_of(parser().parse_args(argv))}
    assert list(arms)[:2] == ["target", "parse-0.9-adaptive"] and len(arms) == 9
    for name, arm in arms.items():
        flags = " ".join(arm.flags)
        assert "prefill" not in flags
        by_sglang = name in ("sglang-eagle3", "standalone")
        judged = name != "target" and not by_sglang
        assert ("SGLANG_SIMULATE_ACC_LEN" in arm.env) == by_sglang
        assert ("--speculative-parse-judge pinned" in flags) == judged
        assert ("--speculative-parse-recover-segments 0" in flags) == judged
        assert ("parse_threshold" in arm.fields) == judged
        assert ("--speculative-draft-model-path" in flags) == (name != "target")
    measured = (ROOT / "benchmarks/gpu/forwards.py").read_text(encoding="utf-8")
    assert "graph-backend-prefill" not in measured


def test_arms_that_differ_in_fields_share_a_server(tmp_path):
    """Red if each of them costs a start, or two that start otherwise share one."""
    argv = ["--pair", next(iter(PAIRS)), "--out", str(tmp_path)]
    arms = arms_of(parser().parse_args([*argv, "--models", str(tmp_path)]))
    assert [[arm.name for arm in group] for group in servers_of(arms)] == [
        ["target"],
        ["parse-0.9-adaptive", "parse-0.8-adaptive", "parse-0.7-adaptive", "hostile"],
        *(["sglang-eagle3"], ["standalone"], ["parse-0.9"], ["rounds"]),
    ]


@pytest.mark.parametrize("share", [0.0, 0.5, 0.9])
def test_random_verdicts_keep_the_share_that_an_arm_names(share):
    """Red if an arm that keeps 90% of drafts keeps another share, or the server cannot
    use its judge."""
    judge, kept = checked_judge("pinned", PinnedJudge), 0
    threshold = threshold_for(share, 16)
    for _ in range(4000):
        scores = checked_scores(judge.scores(torch.zeros(16, 4)), 16)
        kept += count_valid_segments(
            scores, threshold=threshold, keep_rule="first-failure"
        )
    assert kept / (16 * 4000) == pytest.approx(share, abs=0.02)


def test_a_server_finds_the_judge_of_the_benchmark(monkeypatch):
    """Red if no entry point is offered where the servers of an arm look for it."""
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    code = (
        "from sglang_parse.judging.judges import make_judge;"
        "from sglang_parse.options.judge_names import JUDGE_EXTENSIONS;"
        "print(type(make_judge(JUDGE_EXTENSIONS.found['pinned'])).__name__)"
    )
    with environment({"PYTHONPATH": str(JUDGE_FOLDER)}):
        assert os.environ["PYTHONPATH"].split(os.pathsep) == [
            *(str(JUDGE_FOLDER), "elsewhere")
        ]
        command = [sys.executable, "-c", code]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout == "PinnedJudge\n", done.stderr
    assert os.environ["PYTHONPATH"] == "elsewhere"


def test_results_of_a_cut_run_are_kept_and_not_measured_again(tmp_path, capsys):
    """Red if a second call on a lent machine starts from nothing."""
    first = Records(tmp_path / "r.jsonl")
    first.add("forwards", "a", ms=1.0)
    first.add("forwards", "b", error="out of memory")
    second = Records(tmp_path / "r.jsonl")
    assert second.has("a") and not second.has("b") and not second.has("c")
    second.add("forwards", "b", ms=2.0)
    assert [r["ms"] for r in plot.load(tmp_path / "r.jsonl")] == [1.0, 2.0]
    assert plot.load(tmp_path / "missing.jsonl") == []
    assert all("source" in r for r in plot.load(tmp_path / "r.jsonl"))


SHAPE = Shape(
    linear_params=1000,
    head_params=100,
    kv_bytes_per_token=8,
    layers=2,
    heads=4,
    head_dim=8,
)


def forwards_records() -> list[dict]:
    """One shape measured; the machine copies 100 bytes and does 50 FLOP a ms."""
    common = {"pair": "p", "backend": "b", "stage": "forwards"}
    ms = {"median": 2.0, "min": 1.0, "max": 3.0}
    one = {"context": 10, "window": 4, "segments": 2, "num_tokens": 9}
    cells = [
        {"kind": "copy", "num_bytes": 100},
        {"kind": "matmul", "flops": 50},
        *(
            {"kind": "shape", "role": role, "itemsize": 2, **vars(SHAPE)}
            for role in ("target", "draft")
        ),
        {"kind": "decode", "context": 10, "bs": 3},
        {"kind": "draft", "context": 10, "bs": 1},
        {"kind": "verify", "route": "mask", **one},
        {"kind": "verify", "route": "virtual", **one},
        {"kind": "prefill", **one},
        {"kind": "parity", "max_difference": 0.01, "logits_std": 1.0, **one},
    ]
    source = {"commit": "abc", "device": {}, "versions": {}}
    return [
        {"cell": str(i), "ms": ms, "source": source, **common, **cell}
        for i, cell in enumerate(cells)
    ]


def test_floor_is_bytes_or_operations_whichever_takes_longer():
    """Red if a floor leaves out weights, KV or the work of a wide pass."""
    records = forwards_records()
    decode, verify = records[4], records[6]
    num_bytes = 1100 * 2 + 3 * 10 * 8
    assert plot.floor_ms(decode, records) == max(
        num_bytes / 100, SHAPE.pass_flops(3, 10, 3) / 50
    )
    assert plot.floor_ms(verify, records) == SHAPE.pass_flops(9, 10, 2) / 50
    assert plot.floor_ms(decode, records[4:]) is None


def test_bound_counts_kept_tokens_over_drafts_and_pass():
    """Red if the bound of a round forgets the bonus token or the drafts' time."""
    serve = {"pinned": {"kept_fraction": 0.5}, "window": 4, "context": 10}
    assert plot.bound_tokens_per_ms(forwards_records(), serve) == 3 / (4 * 2.0 + 2.0)
    assert plot.bound_tokens_per_ms(forwards_records(), serve | {"pinned": {}}) is None


def test_tables_and_figures_are_drawn_from_the_files(tmp_path, monkeypatch):
    """Red if what a lent machine brings back cannot be read any more."""
    forwards = forwards_records()
    waves = {"median": 10.0, "min": 9.0, "max": 11.0}
    serve = [
        {
            "cell": f"s{arm}{n}",
            "pair": "p",
            "arm": arm,
            "concurrency": n,
            "context": 10,
            "window": 4,
            "pinned": {"kept_fraction": 0.5} if arm == "parse-0.5" else {},
            "tokens_per_s": waves,
            "source": forwards[0]["source"],
        }
        for arm in ("target", "parse-0.5")
        for n in (1, 4)
    ]
    for name, records in (("forwards", forwards), ("serve", serve)):
        lines = "\n".join(json.dumps(r) for r in records)
        (tmp_path / f"{name}.jsonl").write_text(lines + "\n")
    monkeypatch.setattr(sys, "argv", ["plot", "--out", str(tmp_path)])
    plot.main()
    text = (tmp_path / "summary.md").read_text()
    assert "| parse-0.5 | 4 | 10.0 (9.0-11.0) | 1.00x | - |" in text
    assert "| parse-0.5 | 1 | 10.0 (9.0-11.0) | 1.00x | 3% |" in text
    assert "differ by at most 1.00e-02" in text
    assert "| decode | 10 | 3 | 2.00 (1.00-3.00) |" in text
    for name in ("forwards.png", "serve.png"):
        assert (tmp_path / name).read_bytes().startswith(b"\x89PNG")


TARGET = [list(range(k, k + answers.OUTPUT)) for k in range(answers.NUM_PROMPTS)]


def server_that(wrong):
    """A stand-in for `generate` that answers as TARGET does, or as `wrong` changes it:
    wrong(custom_params, params, ids, text) -> ids, text."""

    def generate(url, prompt, num_tokens, **params):
        k = prompts.index(list(prompt))
        custom = params.get("custom_params", {})
        ids, text = wrong(custom, params, list(TARGET[k]), "1234")
        return {"output_ids": ids, "text": text}

    prompts = answers.random_prompts(2026, answers.NUM_PROMPTS, 16)
    return generate


def late_token(ids):
    return [*ids[:20], 0, *ids[21:]]


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (lambda custom, params, ids, text: (ids, text), None),
        (
            lambda custom, params, ids, text: (
                late_token(ids) if custom.get("parse_mode") == "exact" else ids,
                text,
            ),
            "greedy answers of exact agree to 0.42",
        ),
        (
            lambda custom, params, ids, text: (
                ids,
                "a1" if "regex" in params and params["temperature"] else text,
            ),
            "a sampled answer of semantic breaks the grammar",
        ),
        (
            lambda custom, params, ids, text: (
                ids[:-1] if params.get("temperature") else ids,
                text,
            ),
            "another length",
        ),
    ],
)
def test_answers_that_differ_from_the_target_are_an_error(wrong, said, monkeypatch):
    """Red if a card's answers may differ from the target's, or break a grammar, and the
    cell still counts as measured."""

    def sent(url, prompt, num_tokens, **params):
        return generate(url, prompt, num_tokens, **{"temperature": 0, **params})

    generate = server_that(wrong)
    monkeypatch.setattr(answers, "generate", sent)
    asked = answers.Answers("http://nowhere", 16)
    target = asked.of_target()
    assert target["floor"] == {"greedy": 1.0, "ruled": 1.0}
    error = asked.of_parse(target).get("error")
    assert error is None if said is None else said in error


def test_the_target_itself_is_the_floor(monkeypatch):
    """Red if a near tie that the target's own batches decide counts against PARSE."""
    monkeypatch.setattr(
        answers,
        "generate",
        server_that(lambda c, p, ids, text: (late_token(ids), text)),
    )
    asked = answers.Answers("http://nowhere", 16)
    target = {"greedy": TARGET, "ruled": TARGET, "floor": {"greedy": 0.4, "ruled": 0.4}}
    assert "error" not in asked.of_parse(target)
    target["floor"]["greedy"] = 0.6
    assert "greedy answers of off" in asked.of_parse(target)["error"]


def test_a_path_of_a_running_server_is_switched_off_and_on_again(tmp_path):
    """Red if a wave that is measured without a path takes it, if the path stays off, or
    if one that the server itself has switched off comes on."""
    file, paths, synced = tmp_path / "off", FastPaths(), []
    paths.set("target_steps", PROVEN, difference=0.01)
    paths.set("pass_graphs", OFF, "it raised ValueError")
    sync = switched(lambda paths, ranks: synced.append(ranks), file)
    sync(paths, "ranks")
    assert paths.is_on("target_steps") and synced == ["ranks"]
    file.write_text("target_steps pass_graphs short_passes")
    sync(paths, "ranks")
    assert paths.is_off("target_steps") and "short_passes" not in paths.states
    file.write_text("")
    sync(paths, "ranks")
    assert paths.states["target_steps"].state == PROVEN
    assert paths.states["pass_graphs"].why == "it raised ValueError"
