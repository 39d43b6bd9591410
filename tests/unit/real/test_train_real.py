"""The head's training for the real model: vocabulary, texts, export."""

import json
import time
from dataclasses import replace

import torch
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.train_pair.head import feature_layers
from benchmarks.train_pair.model import ModelConfig
from benchmarks.train_real import texts
from benchmarks.train_real.decode import GROUPED, Answer, answers, likeliest
from benchmarks.train_real.export import export_head, go_on_from
from benchmarks.train_real.fit import FitOptions, Fitting, held_out_length, rate
from benchmarks.train_real.questions import JOBS, THINGS, questions
from benchmarks.train_real.target import (
    RealHead,
    RealTarget,
    frequent_tokens,
    with_draft_vocab,
)
from sglang_parse.models import prompts


class Config:
    max_position_embeddings = 99


class Ids:
    eos_token_id, pad_token_id = 2, 0


def tiny_target(vocab: int = 40) -> RealTarget:
    torch.manual_seed(0)
    cfg = ModelConfig(8, 30, hidden=128, heads=2, ffn=64)
    tokens = torch.tensor([0, 2, 5, 6, 7, 11, 30, 39])
    weight = torch.randn(vocab, 128)
    return RealTarget(cfg, Config(), weight, weight[tokens], torch.ones(128), tokens)


def test_draft_vocabulary_is_the_most_used_in_rising_order():
    """Red if rare tokens push out frequent ones, or rows are not in order."""
    found = frequent_tokens([[5, 5, 9], [9, 5, 3]], 3, vocab=12)
    assert found.tolist() == [3, 5, 9]
    assert frequent_tokens([[5]], 3, vocab=12).tolist() == [0, 1, 5]


def test_exported_head_names_its_tokens(tmp_path):
    """Red if SGLang would read another token than the row was trained for."""
    target = tiny_target()
    export_head(RealHead(target), target, Ids(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    assert (weights["d2t"] + torch.arange(8)).tolist() == target.tokens.tolist()
    assert weights["lm_head.weight"].shape == (8, 128)
    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["vocab_size"], config["draft_vocab_size"]) == (40, 8)
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]


def test_exported_fc_holds_the_sizes_of_the_features(tmp_path):
    """Red if SGLang's head would see features of another size than training's did."""
    target = tiny_target()
    head = RealHead(target)
    features = torch.randn(2, 9, 3 * 128) * torch.tensor([1, 50, 9]).repeat_interleave(
        128
    )
    head.scale_fc(features)
    export_head(head, target, Ids(), tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    seen = features @ weights["fc.weight"].float().T
    ids = torch.zeros(2, 9, dtype=torch.long)
    plain = super(RealHead, head).unroll(ids, features / head.sizes, 1)
    assert torch.equal(next(plain), next(head.unroll(ids, features, 1)))
    torch.testing.assert_close(
        seen, features / head.sizes @ head.fc.T, atol=2e-2, rtol=0
    )


def test_a_head_that_is_gone_on_from_may_have_other_tokens(tmp_path):
    """Red if a row goes to another token, or the features' sizes are lost."""
    target = tiny_target()
    head = RealHead(target)
    head.scale_fc(torch.randn(2, 9, 3 * 128) * 7)
    torch.nn.init.normal_(head.head)
    export_head(head, target, Ids(), tmp_path)
    more = sorted({*range(0, 40, 3), *target.tokens.tolist()[1:]})
    other = RealHead(
        replace(target, tokens=torch.tensor(more), head=target.embed[more])
    )
    other.scale_fc(torch.randn(2, 9, 3 * 128) * 0.1)
    go_on_from(other, tmp_path)
    kept = dict(zip(target.tokens.tolist(), head.head.half().float(), strict=True))
    for token, row in zip(more, other.head, strict=True):
        assert torch.equal(row, kept.get(token, target.embed[token]))
    torch.testing.assert_close(other.exported_fc(), head.exported_fc().half().float())
    assert torch.equal(other.wqkv, head.wqkv.half().float())


def test_guesses_count_in_the_whole_vocabulary():
    """Red if a row of the draft vocabulary is taken for a token."""
    target = tiny_target()
    head, hidden = RealHead(target), torch.randn(3, 128)
    best = head.logits(hidden).argmax(-1)
    assert head.guess(hidden).tolist() == target.tokens[best].tolist()


def llama(dtype: torch.dtype = torch.float32) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=48,
        hidden_size=128,
        intermediate_size=96,
        num_hidden_layers=8,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
        initializer_range=0.3,
    )
    model = LlamaForCausalLM(config).eval().requires_grad_(False).to(dtype)
    model.set_attn_implementation(GROUPED)
    return model


CONTEXTS = [[5, 6, 7, 8, 9], [11, 3], [7, 7, 30], [40, 9, 8, 7, 6, 5, 4], [12], [13]]


def test_decoding_equals_generate_one_by_one():
    """Red if padding, a dropped row or the grouped attention changes an answer."""
    model = llama()
    found = answers(model, CONTEXTS, longest=20)
    assert len({len(a.own) for a in found}) > 1
    model.set_attn_implementation("sdpa")
    for answer, context in zip(found, CONTEXTS, strict=True):
        alone = model.generate(torch.tensor([context]), max_new_tokens=20)
        assert alone[0].tolist() == context + answer.own


def test_states_of_decoding_equal_one_forward():
    """Red if a state belongs to another token, layer or answer."""
    model = llama()
    for answer in answers(model, CONTEXTS, longest=9):
        ids = torch.tensor([answer.context + answer.own])[:, :-1]
        out = model.model(ids, output_hidden_states=True)
        layers = [out.hidden_states[k][0] for k in feature_layers(8)]
        wanted = torch.cat([*layers, out.last_hidden_state[0]], -1)
        torch.testing.assert_close(answer.states.float(), wanted, atol=0.05, rtol=0.01)


def test_near_ties_are_decided_in_float32():
    """Red if bfloat16 logits choose the token."""
    hidden = torch.ones(1, 128, dtype=torch.bfloat16)
    weight = torch.full((48, 128), 0.25)
    weight[31, :2] += 0.03
    weight = weight.bfloat16()
    exact = hidden.float() @ weight.float().mT
    assert (hidden @ weight.mT).argmax().item() != 31 == exact.argmax().item()
    assert likeliest(weight, hidden) == [31]


def test_texts_go_on_where_a_run_stopped(tmp_path, monkeypatch):
    """Red if a finished batch is decoded again, or questions change with the count."""
    assert questions(30, 1)[:10] == questions(10, 1)
    done = [
        Answer([4, 5], [6], torch.ones(2, 8)),
        Answer([7], [8, 2], torch.ones(2, 8)),
    ]
    monkeypatch.setattr(texts, "contexts_of", lambda *_: CONTEXTS * 100)
    decoded = []
    monkeypatch.setattr(
        texts, "decoded", lambda model, batch, longest: decoded.append(batch) or done
    )
    options = {"longest": 3, "seed": 1, "until": time.monotonic() + 60}
    first = texts.write_texts(None, None, tmp_path, count=100, **options)
    more = texts.write_texts(None, None, tmp_path, count=200, threads=2, **options)
    assert [len(batch) for batch in decoded] == [texts.BATCH] * 2
    assert [(a.context, a.own) for a in more] == [(a.context, a.own) for a in done * 2]
    assert torch.equal(first[1].states, done[1].states)
    options["until"] = time.monotonic()
    assert len(texts.write_texts(None, None, tmp_path, count=400, **options)) == 4


def test_no_question_is_one_of_the_tests():
    """Red if a figure of the tests' conversations is of questions trained on."""
    asked = {repr(q) for q in questions(12288, 2)}  # of the shipped head's training
    assert asked.isdisjoint(map(repr, prompts.conversations(8 * 52)))
    assert set(THINGS).isdisjoint(prompts.TOPICS) and set(JOBS).isdisjoint(
        prompts.TASKS
    )


def some_answers() -> list[Answer]:
    model = llama()
    return answers(model, CONTEXTS, longest=12)


def options_of(folder, **changed) -> FitOptions:
    values = {"out": folder / "head", "state": folder / "state.pt"}
    values |= {"end": time.monotonic() + 600, "epochs": 6, "batch": 3, "seed": 1}
    return FitOptions(**(values | {"dtype": torch.float32} | changed))


def weights_of(folder) -> dict[str, torch.Tensor]:
    return load_file(folder / "head" / "model.safetensors")


def test_training_that_goes_on_equals_one_run(tmp_path):
    """Red if a stop loses a step, the optimizer's state or the order of the groups."""
    model, found = llama(), some_answers()
    target = with_draft_vocab(model, torch.arange(0, 48, 2))
    for name in ("whole", "parts"):
        (tmp_path / name).mkdir()
    Fitting(target, found, options_of(tmp_path / "whole")).run(Ids())
    first = Fitting(target, found, options_of(tmp_path / "parts"))
    for _ in range(5):
        first.one_step()
    first.save(Ids())
    second = Fitting(target, found, options_of(tmp_path / "parts"))
    assert second.step == 5
    second.run(Ids())
    whole, parts = weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts")
    assert all(torch.equal(whole[name], parts[name]) for name in whole)


def test_training_lowers_the_loss_and_counts_held_out_chains(tmp_path):
    """Red if a state, a token or a padded row is paired with another's."""
    model, found = llama(), some_answers()
    target = with_draft_vocab(model, torch.arange(48))
    fitting = Fitting(target, found, options_of(tmp_path, epochs=60))
    losses = [fitting.one_step()[0].item() for _ in range(120)]
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])
    figures = held_out_length(fitting.head, found, 4, torch.float32)
    assert figures["tokens"] == sum(len(a.own) - 1 for a in found)
    assert figures["accept_length"] > 1.5


def test_rate_warms_up_and_ends_low():
    """Red if a run begins at the full rate or never falls."""
    assert rate(0, 500) < rate(19, 500) / 10
    assert rate(19, 500) > 0.99 and rate(499, 500) < 0.03
