"""The head's training for the real model: vocabulary, texts, export."""

import json

import torch
from safetensors.torch import load_file

from benchmarks.train_pair.head import Eagle3Head
from benchmarks.train_pair.model import ModelConfig
from benchmarks.train_real import texts
from benchmarks.train_real.export import export_head
from benchmarks.train_real.fit import full_vocabulary, rate
from benchmarks.train_real.target import RealTarget, frequent_tokens


class Config:
    max_position_embeddings = 99


class Model:
    config = Config()


class Ids:
    eos_token_id, pad_token_id = 2, 0


def tiny_target(vocab: int = 40) -> RealTarget:
    torch.manual_seed(0)
    cfg = ModelConfig(8, 30, hidden=128, heads=2, ffn=64)
    tokens = torch.tensor([0, 2, 5, 6, 7, 11, 30, 39])
    weight = torch.randn(vocab, 128)
    return RealTarget(Model(), cfg, weight, weight[tokens], torch.ones(128), tokens)


def test_draft_vocabulary_is_the_most_used_in_rising_order():
    """Red if rare tokens push out frequent ones, or rows are not in order."""
    found = frequent_tokens([[5, 5, 9], [9, 5, 3]], 3, vocab=12)
    assert found.tolist() == [3, 5, 9]
    assert frequent_tokens([[5]], 3, vocab=12).tolist() == [0, 1, 5]


def test_exported_head_names_its_tokens(tmp_path):
    """Red if SGLang would read another token than the row was trained for."""
    target = tiny_target()
    export_head(Eagle3Head(target), target, Ids(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert (weights["d2t"] + torch.arange(8)).tolist() == target.tokens.tolist()
    assert weights["lm_head.weight"].shape == (8, 128)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["vocab_size"], config["draft_vocab_size"]) == (40, 8)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]


def test_held_out_chains_count_in_the_whole_vocabulary():
    """Red if a token outside the draft vocabulary could be called drafted."""
    target = tiny_target()
    head = Eagle3Head(target)
    whole = full_vocabulary(head, target)
    hidden = torch.randn(3, 128)
    best = head.logits(hidden).argmax(-1)
    assert whole.logits(hidden).argmax(-1).tolist() == target.tokens[best].tolist()


def test_texts_go_on_where_a_run_stopped(tmp_path):
    """Red if a cut-off line stops the next run, or questions change with the count."""
    path = tmp_path / "texts.jsonl"
    assert texts.read_texts(path) == []
    path.write_text("[[1, 2], [3]]\n[[4], [5,")
    assert texts.read_texts(path) == [([1, 2], [3])]
    assert texts.questions(30, 1)[:10] == texts.questions(10, 1)


def test_rate_warms_up_and_ends_low():
    """Red if a run that goes on starts at the full rate's end or never falls."""
    assert rate(0, 0, 100) < rate(29, 0, 100) == 1
    assert rate(500, 100, 100) < 0.03
