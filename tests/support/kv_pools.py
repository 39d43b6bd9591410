"""KV pools as SGLang allocates them for the embedded draft model."""

import json

import torch

from sglang_parse.embedded import DRAFT_PATH

DRAFT = json.loads((DRAFT_PATH / "config.json").read_text())


def pool_of_draft(dtype: torch.dtype, num_tokens: int = 50):
    """The pool SGLang allocates for the draft model. Needs the `plugins` fixture."""
    from sglang_parse.cpu.ops import CpuMHATokenToKVPool

    return CpuMHATokenToKVPool(
        size=num_tokens,
        page_size=1,
        dtype=dtype,
        head_num=DRAFT["num_key_value_heads"],
        head_dim=DRAFT["head_dim"],
        layer_num=DRAFT["num_hidden_layers"],
        device="cpu",
        enable_memory_saver=False,
        enable_alt_stream=False,
    )
