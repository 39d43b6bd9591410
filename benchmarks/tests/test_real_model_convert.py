"""GGUF names, orders and tokens as transformers wants them."""

import numpy as np

from benchmarks.real_model import convert, tokenizer


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
