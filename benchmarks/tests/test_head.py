"""The shipped EAGLE-3 head: SGLang maps its weights and it fits the target."""

import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from sglang_parse.embedded import HEAD_PATH, TARGET_PATH


class Param:
    """Stands for a parameter of SGLang's model, and keeps what is loaded into it."""

    def __init__(self) -> None:
        self.got: dict[object, tuple[int, ...]] = {}

    def weight_loader(self, _, loaded: Tensor, shard=None) -> None:
        self.got[shard] = tuple(loaded.shape)


LAYER = "model.layers.0."
EXPECTED = {
    "model.fc.weight": {None: (128, 384)},
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


def test_sglang_loads_every_shipped_weight():
    """Red if a name of the shipped head is not one that SGLang's class maps."""
    eagle = pytest.importorskip("sglang.srt.models.llama_eagle3")
    params = {name: Param() for name in EXPECTED}
    model = SimpleNamespace(named_parameters=lambda: params.items())
    weights = load_file(HEAD_PATH / "model.safetensors")
    eagle.LlamaForCausalLMEagle3.load_weights(model, weights.items())
    assert {name: p.got for name, p in params.items()} == EXPECTED
    assert sum(len(p.got) for p in params.values()) == len(weights)
    assert {w.dtype for w in weights.values()} == {torch.float32}


def test_shipped_config_fits_the_target():
    head, target = (
        json.loads((path / "config.json").read_text())
        for path in (HEAD_PATH, TARGET_PATH)
    )
    changed = {"architectures", "num_hidden_layers", "draft_vocab_size"}
    assert {k for k in head if head.get(k) != target.get(k)} == changed
    assert head["architectures"] == ["LlamaForCausalLMEagle3"]
    assert head["draft_vocab_size"] == target["vocab_size"]
