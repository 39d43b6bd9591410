"""Refusals that need a model's config or its tokenizer."""

import itertools
from types import SimpleNamespace

import pytest
from sglang.srt.configs.model_config import AttentionArch

from sglang_parse.startup import check_architecture

FIELDS = ("is_multimodal", "is_hybrid_swa", "is_encoder_decoder")


def model_config(**fields):
    values = {name: False for name in FIELDS} | {"is_generation": True}
    values |= {"attention_arch": AttentionArch.MHA} | fields
    hf = SimpleNamespace(architectures=["SomeForCausalLM"])
    return SimpleNamespace(hf_config=hf, **values)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *itertools.product(FIELDS, [True]),
        ("is_generation", False),
        ("attention_arch", AttentionArch.MLA),
    ],
)
@pytest.mark.parametrize("flag", ["--model-path", "--speculative-draft-model-path"])
def test_model_whose_kv_cannot_branch_is_refused(monkeypatch, flag, field, value):
    """Red if a target or draft whose KV cannot branch is served."""
    from sglang.srt.configs import hybrid_arch

    monkeypatch.setattr(hybrid_arch, "mambaish_config", lambda _: None)
    check_architecture(model_config(), flag)
    with pytest.raises(ValueError, match=f"{flag}: SomeForCausalLM"):
        check_architecture(model_config(**{field: value}), flag)


def test_recurrent_state_is_refused(monkeypatch):
    """Red if a mamba target is served: its state cannot be cut back."""
    from sglang.srt.configs import hybrid_arch

    monkeypatch.setattr(hybrid_arch, "mambaish_config", lambda _: object())
    with pytest.raises(ValueError, match="recurrent state"):
        check_architecture(model_config(), "--model-path")
