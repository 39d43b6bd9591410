"""`sglang-parse estimate`: sizes of models, times of rounds, and what it prints."""

import json
from dataclasses import replace
from pathlib import Path
from statistics import median

import pytest

from sglang_parse.cli import main as cli
from sglang_parse.cli.estimate import (
    CARDS,
    MODELS,
    SEGMENTS,
    ModelShape,
    PairTimes,
    speed,
)

MEASURED = Path(__file__).parents[3] / "benchmarks" / "results" / "gpu"
BIG = ["--target", "Qwen/Qwen3-32B", "--draft", "Qwen3-1.7B"]


def h200(context: int = 2048) -> PairTimes:
    shapes = (ModelShape.find(name) for name in ("Qwen3-32B", "Qwen3-1.7B"))
    return PairTimes(*shapes, CARDS["h200"], context=context)


def records(name: str) -> list[dict]:
    lines = (MEASURED / name).read_text("utf-8").splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("Qwen3-0.6B", 0.60),
        ("Qwen3-32B", 32.8),
        ("qwen3-30b-a3b", 30.5),
        ("Qwen/Qwen3-235B-A22B", 235),
        ("Llama-3.2-1B-Instruct", 1.24),
        ("Llama-3.1-70B-Instruct", 70.6),
    ],
)
def test_sizes_are_those_of_the_models(name, billions):
    """Red if parameters are counted wrongly: every figure follows from them."""
    shape = ModelShape.find(name)
    assert shape.weight_bytes == pytest.approx(2e9 * billions, rel=0.02)


def test_a_token_reads_the_experts_that_it_uses():
    """Red if a mixture of experts costs what all of its parameters cost, or its KV is
    that of another model."""
    shape = ModelShape.find("Qwen3-235B-A22B")
    assert shape.read_bytes(1) == pytest.approx(2 * 21.5e9, rel=0.02)
    assert shape.read_bytes(10**6) == pytest.approx(2 * 234e9, rel=0.02)
    assert ModelShape.find("Qwen3-32B").kv_bytes == 262_144


def test_a_config_file_gives_the_same_sizes(tmp_path):
    """Red if a key of `config.json` is misread, or a null or missing one ends it."""
    config = {
        "hidden_size": 4096,
        "num_hidden_layers": 36,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 12288,
        "vocab_size": 151936,
        "head_dim": None,
    }
    (tmp_path / "config.json").write_text(json.dumps({"text_config": config}))
    (name, *sizes) = vars(ModelShape.find(str(tmp_path))).values()
    assert name == tmp_path.name and sizes == MODELS["Qwen3-8B"]
    assert ModelShape.find(str(tmp_path / "config.json")).layers == 36
    (tmp_path / "config.json").write_text(json.dumps(config | {"kv_lora_rank": 512}))
    with pytest.raises(ValueError, match="does not know latent attention"):
        ModelShape.find(str(tmp_path))


def test_forwards_take_what_an_h200_measured():
    """Red if the formula and the card are more than 10% apart in a decode step of
    target or draft, or in a pass with verdicts."""
    shapes = [r for r in records("forwards.jsonl") if "ms" in r and "context" in r]
    seen = 0
    for r in shapes:
        times = h200(r["context"])
        if r["kind"] in ("decode", "draft"):
            model = times.target if r["kind"] == "decode" else times.draft
            ms = times.decode_ms(model, r["bs"])
        elif r["kind"] == "verify" and "virtual" in r["cell"]:
            ms = times.forward_ms(times.target, r["num_tokens"], 1)
            # The measurement includes the layout of the pass.
            ms += times.card["host_round_ms"] + times.card["host_request_ms"]
        else:
            continue
        seen += 1
        assert ms == pytest.approx(r["ms"]["median"], rel=0.1), r["cell"]
    assert seen == 10


@pytest.mark.parametrize("bs", [1, 8, 32])
def test_rounds_take_what_an_h200_measured(bs):
    """Red if the formula and the judged rounds of a server, which had 32 to 192 draft
    steps, are more than 12% apart in the median."""
    times, ratios = h200(1024), []
    between = times.card["host_between_ms"]  # the log has the rounds alone
    for r in records("rounds.jsonl"):
        if r["bs"] == bs and r["judged"] and r["steps"] >= 32:
            stages = ("draft_ms", "layout_ms", "verify_ms", "decide_ms")
            measured = sum(r[stage] for stage in stages)
            ms = times.round_ms(r["bs"], r["steps"], r["rows"]) - between
            ratios.append(ms / measured)
    assert len(ratios) >= 12
    assert median(ratios) == pytest.approx(1, abs=0.12)


def test_better_drafts_and_fewer_requests_gain_more():
    """Red if the formula favours drafts that are rejected, or shared hardware."""

    def best(bs: int, kept: float) -> float:
        return max(speed(h200(), bs, kept, n).ratio for n in SEGMENTS)

    assert best(1, 1.0) > best(1, 0.9) > best(1, 0.6) > best(1, 0.1)
    assert best(1, 0.9) > best(8, 0.9) > best(32, 0.9) > 1


def test_guesses_gain_where_they_outweigh_the_hosts_part():
    """Red if guesses of a draft cost nothing, or gain nothing."""

    def best(tokens_a_step: float, by_head: bool = False) -> float:
        pair = replace(h200(), tokens_a_step=tokens_a_step, by_head=by_head)
        return max(speed(pair, 1, 0.9, n).ratio for n in SEGMENTS)

    assert best(2.2) > 1.2 * best(1.0) > best(1.2) > 1
    assert 1.1 * best(1.0) < best(2.2, by_head=True) < 0.98 * best(2.2)


def test_estimate_prints_a_table(capsys):
    """Red if a word is cut at 80 columns, or the figures are not called estimates."""
    assert cli.main(["estimate", *BIG]) == 0
    text = capsys.readouterr().out
    assert "\u2026" not in text and "estimates from a formula" in " ".join(text.split())
    lines = [line for line in text.splitlines() if line.startswith("\u2502")]
    rows = [line.split("\u2502")[1:-1] for line in lines]
    assert [row[0].strip() for row in rows] == ["1", "8", "32"]
    assert max(map(len, text.splitlines())) <= 80


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--kept", "1.5"], "--kept is 1.5; expected"),
        (["--tokens-a-step", "0.5"], "--tokens-a-step is 0.5; expected 1 or more"),
        (["--draft-head"], "--draft-head needs --tokens-a-step above 1"),
        (["--tokens-a-step", "nan"], "--tokens-a-step is nan; expected 1 or more"),
        (["--draft", "/nowhere"], "'/nowhere' is no decoder's config.json"),
        (["--gpu", "h100"], "leave KV cache for 792 tokens, but --concurrency 32"),
    ],
)
def test_estimate_refuses_in_one_sentence(more, message, capsys):
    """Red if a pair that does not fit gets a speed, or a bad value a traceback."""
    assert cli.main(["estimate", *BIG, *more]) == 1
    out, err = capsys.readouterr()
    assert not out and message in err and len(err.splitlines()) == 1
