"""GGUF names, orders and tokens as transformers wants them."""

import numpy as np
import pytest

from benchmarks.real_model import convert, tokenizer


@pytest.mark.parametrize(
    ("gguf", "hf"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
    ],
)
def test_names(gguf, hf):
    """Red if a weight is written where no model looks for it."""
    assert convert.hf_name(gguf) == hf


def test_heads_get_their_halves_back():
    """Red if rotary positions turn the wrong pairs. GGUF stores the rows of a head as
    first half, second half, in turn (llama.cpp, convert_hf_to_gguf.py, `permute`)."""
    heads, size, width = 2, 6, 3
    hf = np.arange(heads * size * width, dtype=np.float32).reshape(-1, width)
    stored = np.empty_like(hf)
    for head in range(heads):
        for i in range(size // 2):
            for half in range(2):
                row = hf[head * size + half * (size // 2) + i]
                stored[head * size + 2 * i + half] = row
    fields = {"llama.attention.head_count": heads}
    assert (convert.in_halves("blk.0.attn_q.weight", stored, fields) == hf).all()
    assert (convert.in_halves("blk.0.attn_v.weight", stored, fields) == stored).all()


def test_coarser_weights_are_near_and_few():
    """Red if the draft is the target itself, or another model."""
    weight = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    rough = convert.coarser(weight, 5)
    step = np.abs(weight.reshape(-1, 32)).max(1, keepdims=True) / 15
    assert (np.abs(rough - weight).reshape(-1, 32) <= step * 0.5001).all()
    assert all(len(np.unique(block)) <= 31 for block in rough.reshape(-1, 32))
    assert (convert.coarser(np.zeros((1, 32), np.float32), 5) == 0).all()


def test_tokenizer_splits_digits_and_keeps_special_tokens_whole():
    """Red if numbers are split unlike in training: the model then cannot count."""
    letters = [chr(c) for c in range(ord("a"), ord("z") + 1)]
    words = ["<|im_end|>", *letters, "1", "2", "12", "Ġ", "ab"]
    own = {
        "tokens": words,
        "token_type": [3] + [1] * (len(words) - 1),
        "merges": ["1 2", "a b"],
    }
    built = tokenizer.build_tokenizer(own)
    assert built.encode("ab12<|im_end|>").tokens == ["ab", "1", "2", "<|im_end|>"]
    assert built.decode([words.index("ab"), words.index("Ġ"), 1]) == "ab a"


def test_another_rule_of_splitting_is_refused(tmp_path):
    """Red if another model's tokenizer is written with this one's rule."""
    with pytest.raises(ValueError, match="'llama-bpe', expected 'smollm'"):
        tokenizer.save_tokenizer({"tokenizer.ggml.pre": "llama-bpe"}, tmp_path)
