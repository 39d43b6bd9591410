"""Tiny models with sparse attention: an index selects so few tokens for each query that
most of a prompt is left out. `tests/support/sparse_attention.py` serves them."""

from typing import Any

from tests.support.tiny_engine import SPARSE_ENV
from tests.support.tiny_models import MLA, RESIDUAL, YARN, TinyModel

TOPK = 16
# With few heads many scores of an index are zero, and so the same. SGLang knows keys of
# this size alone.
FIELDS = {
    **{**MLA, "first_k_dense_replace": 1, "q_lora_rank": 24, "rope_parameters": YARN},
    **{"n_routed_experts": 8, "norm_topk_prob": True, "routed_scaling_factor": 2.5},
    **{"index_topk": TOPK, "index_head_dim": 128, "index_n_heads": 8},
}
MORE = {
    **{"topk_method": "noaux_tc", "scoring_func": "sigmoid", "moe_layer_freq": 1},
}
FLAGS = (
    *("--attention-backend", "dsa", "--chunked-prefill-size", "64"),
    *("--speculative-draft-attention-backend", "parse_torch"),
    *("--max-total-tokens", "4096"),
)
SERVED: dict[str, Any] = {
    **{"residual": RESIDUAL, "flags": FLAGS, "environment": {SPARSE_ENV: "1"}},
    "drafts_itself": False,
    # Answers begin in the second page of 64 slots, and end in the third.
    "longer": 84,
}
SPARSE = {
    "deepseek_v32": TinyModel(
        "DeepseekV32Config",
        {**FIELDS, "n_group": 4, "topk_group": 2},
        more=MORE,
        **SERVED,
    ),
    "glm_moe_dsa": TinyModel(
        "GlmMoeDsaConfig",
        {
            **{**FIELDS, "n_group": 1, "topk_group": 1, "num_hidden_layers": 3},
            "indexer_types": ["full", "shared", "full"],
        },
        more={**MORE, "indexer_rope_interleave": True},
        **SERVED,
    ),
}
