"""Refusals that need a model's config or its tokenizer."""

import itertools
from types import SimpleNamespace

import pytest

from sglang_parse.startup import check_target

FIELDS = ("is_multimodal", "is_hybrid_swa", "is_encoder_decoder")


def model_config(**fields):
    values = {name: False for name in FIELDS} | {"is_generation": True} | fields
    hf = SimpleNamespace(architectures=["SomeForCausalLM"])
    return SimpleNamespace(hf_config=hf, **values)


@pytest.mark.parametrize(
    ("field", "value"), [*itertools.product(FIELDS, [True]), ("is_generation", False)]
)
def test_check_target_refuses(monkeypatch, field, value):
    """Red if a target whose KV cannot branch is served."""
    from sglang.srt.configs import hybrid_arch

    monkeypatch.setattr(hybrid_arch, "mambaish_config", lambda _: None)
    check_target(model_config())
    with pytest.raises(ValueError, match="--model-path: SomeForCausalLM"):
        check_target(model_config(**{field: value}))


def test_check_target_refuses_recurrent_state(monkeypatch):
    """Red if a mamba target is served: its state cannot be cut back."""
    from sglang.srt.configs import hybrid_arch

    monkeypatch.setattr(hybrid_arch, "mambaish_config", lambda _: object())
    with pytest.raises(ValueError, match="recurrent state"):
        check_target(model_config())
