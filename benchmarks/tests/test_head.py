"""The shipped EAGLE-3 heads: SGLang maps their weights and each fits its model."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sglang_parse.embedded import (
    DRAFT_HEAD_PATH,
    DRAFT_PATH,
    HEAD_PATH,
    TARGET_PATH,
)


class Param:
    """Stands for a parameter of SGLang's model, and keeps what is loaded into it."""

    def __init__(self) -> None:
        self.got: dict[object, tuple[int, ...]] = {}

    def weight_loader(self, _, loaded: Tensor, shard=None) -> None:
        self.got[shard] = tuple(loaded.shape)


LAYER = "model.layers.0."
EXPECTED = {
    "model.norm.weight": {None: (128,)},
    "lm_head.weight": {None: (640, 128)},
    f"{LAYER}input_layernorm.weight": {None: (128,)},
    f"{LAYER}hidden_norm.weight": {None: (128,)},
    f"{LAYER}post_attention_layernorm.weight": {None: (128,)},
    f"{LAYER}self_attn.qkv_proj.weight": dict.fromkeys("qkv", (128, 256)),
    f"{LAYER}self_attn.o_proj.weight": {None: (128, 128)},
    f"{LAYER}mlp.gate_up_proj.weight": dict.fromkeys((0, 1), (256, 128)),
    f"{LAYER}mlp.down_proj.weight": {None: (128, 256)},
}


@pytest.mark.parametrize(("path", "layers"), [(HEAD_PATH, 3), (DRAFT_HEAD_PATH, 2)])
def test_sglang_loads_every_shipped_weight(path, layers):
    """Red if a name of a shipped head is not one that SGLang's class maps."""
    eagle = pytest.importorskip("sglang.srt.models.llama_eagle3")
    expected = EXPECTED | {"model.fc.weight": {None: (128, 128 * layers)}}
    params = {name: Param() for name in expected}
    model = SimpleNamespace(named_parameters=lambda: params.items())
    weights = load_file(path / "model.safetensors")
    eagle.LlamaForCausalLMEagle3.load_weights(model, weights.items())
    assert {name: p.got for name, p in params.items()} == expected
    assert sum(len(p.got) for p in params.values()) == len(weights)
    assert {w.dtype for w in weights.values()} == {torch.float32}


@pytest.mark.parametrize(
    ("path", "model", "more"),
    [(HEAD_PATH, TARGET_PATH, ()), (DRAFT_HEAD_PATH, DRAFT_PATH, ("eagle_config",))],
)
def test_shipped_config_fits_the_model(path, model, more):
    head, target = (
        json.loads((folder / "config.json").read_text()) for folder in (path, model)
    )
    changed = {"architectures", "num_hidden_layers", "draft_vocab_size", *more}
    assert {k for k in head if head.get(k) != target.get(k)} == changed
    assert head["architectures"] == ["LlamaForCausalLMEagle3"]
    assert head["draft_vocab_size"] == target["vocab_size"]
