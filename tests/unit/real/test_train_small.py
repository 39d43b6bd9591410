"""The small draft of the real model: which layers it keeps, what counts, its folder."""

import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from benchmarks.train_real.decode import Answer, answers
from benchmarks.train_real.small import (
    SmallOptions,
    export_small,
    hidden_of,
    kept_layers,
    pruned,
    rows_of,
    small_length,
    target_hidden,
    train_small,
)

NONE = torch.empty(0)
TEXTS = [Answer([5, 6, 7], [8, 9, 10, 11], NONE), Answer([5, 6], [7, 8], NONE)]


class Tokenizer:
    def save_pretrained(self, path):
        (path / "tokenizer.json").write_text("{}")


def tiny(layers: int = 5) -> LlamaForCausalLM:
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=32,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=layers,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=True,
        eos_token_id=2,
        pad_token_id=0,
    )
    return LlamaForCausalLM(config).eval().requires_grad_(False)


def test_kept_layers_are_spread_from_the_first_to_the_last():
    """Red if the last layer is lost, or two layers are the same."""
    assert kept_layers(6, 30) == [0, 6, 12, 17, 23, 29]
    assert kept_layers(5, 5) == [0, 1, 2, 3, 4]
    assert kept_layers(1, 30) == [0]


def test_all_layers_kept_is_the_target_itself():
    """Red if pruning changes what the kept layers compute."""
    model = tiny()
    ids = torch.tensor([[1, 2, 3]])
    same = pruned(model, 5).eval()
    assert torch.equal(same(ids).logits, model(ids).logits)
    assert len(pruned(model, 2).model.layers) == 2


def test_rows_predict_the_answers_tokens_only():
    """Red if padding or the question counts."""
    ids, own = rows_of(TEXTS)
    assert ids.tolist() == [[5, 6, 7, 8, 9, 10, 11], [5, 6, 7, 8, 0, 0, 0]]
    assert own.nonzero().tolist() == [[0, 2], [0, 3], [0, 4], [0, 5], [1, 1], [1, 2]]


def test_the_targets_own_text_is_drafted_whole():
    """Red if a round yields less than its chain and one token of the target."""
    model = tiny()
    context = [3, 4]
    out = model.generate(torch.tensor([context]), max_new_tokens=12, do_sample=False)
    own = out[0, 2:].tolist()
    found = small_length(model, [Answer(context, own, NONE)], 1)
    assert found["share_right"] == 1
    assert found["tokens"] == len(own)
    assert found["rounds"] == -(-len(own) // 5)


def test_the_targets_hidden_states_are_those_of_its_forward():
    """Red if distillation pairs a row with another token's distribution."""
    model = tiny()
    found = answers(model, [[5, 6, 7], [5, 6]], longest=4)
    hidden, _, _ = hidden_of(model, found)
    stored = target_hidden(found, 32).float()
    torch.testing.assert_close(stored, hidden, atol=0.02, rtol=0.02)


def test_training_comes_nearer_to_the_target_and_leaves_it_alone(tmp_path):
    """Red if nothing is learned, the target moves, or the folder differs."""
    model = tiny()
    before = model.lm_head.weight.clone()
    found = answers(model, [[5, 6, 7], [5, 6], [9]], longest=9)
    options = SmallOptions(
        out=tmp_path,
        layers=2,
        end=time.monotonic() + 60,
        epochs=200,
        batch=2,
        seed=0,
        dtype=torch.float32,
    )
    small = train_small(model, found, options)
    assert torch.equal(small.lm_head.weight, before)
    ids = torch.tensor([found[0].context + found[0].own])
    wanted = model(ids).logits.softmax(-1)

    def distance(other):
        return (other(ids).logits.softmax(-1) - wanted)[:, 2:-1].abs().sum().item()

    assert distance(small) < distance(pruned(model, 2).eval())
    export_small(small, Tokenizer(), tmp_path)
    read = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert torch.allclose(read(ids).logits, small(ids).logits, atol=1e-2)
