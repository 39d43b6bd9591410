"""Models that cannot be served are refused by name."""

import itertools
from types import SimpleNamespace

import pytest
from sglang.srt.configs.model_config import AttentionArch

from sglang_parse.runtime import architecture

FIELDS = ("is_multimodal", "model_is_mrope", "is_hybrid_swa", "is_encoder_decoder")


def runner(sliding_window_size=None, **fields):
    values = {name: False for name in FIELDS} | {"is_generation": True}
    values |= {"attention_arch": AttentionArch.MHA} | fields
    hf = SimpleNamespace(architectures=["SomeForCausalLM"])
    config = SimpleNamespace(hf_config=hf, **values)
    return SimpleNamespace(model_config=config, sliding_window_size=sliding_window_size)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *itertools.product(FIELDS, [True]),
        ("is_generation", False),
        ("attention_arch", AttentionArch.MLA),
        # Gemma 2 and 3 say of themselves that they are not hybrid.
        ("sliding_window_size", 4095),
        ("sliding_window_size", 0),
    ],
)
@pytest.mark.parametrize("flag", ["--model-path", "--speculative-draft-model-path"])
def test_model_whose_kv_cannot_branch_is_refused(monkeypatch, flag, field, value):
    """Red if a target or draft whose KV cannot branch is served."""
    monkeypatch.setattr(architecture, "mambaish_config", lambda _: None)
    architecture.check_architecture(runner(), flag)
    architecture.check_architecture(runner(sliding_window_size=-1), flag)
    with pytest.raises(ValueError, match=f"{flag}: SomeForCausalLM"):
        architecture.check_architecture(runner(**{field: value}), flag)


def test_recurrent_state_is_refused(monkeypatch):
    """Red if a mamba target is served: its state cannot be cut back."""
    monkeypatch.setattr(architecture, "mambaish_config", lambda _: object())
    with pytest.raises(ValueError, match="recurrent state"):
        architecture.check_architecture(runner(), "--model-path")
