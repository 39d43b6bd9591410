"""Refusals that need a model's config or its tokenizer."""

import itertools
import json
from types import SimpleNamespace

import pytest
from sglang.srt.configs.model_config import AttentionArch

from sglang_parse.config import ParseConfig
from sglang_parse.embedded import HEAD_PATH, TARGET_PATH
from sglang_parse.startup import check_architecture, check_head

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
    from sglang.srt.configs import hybrid_arch

    monkeypatch.setattr(hybrid_arch, "mambaish_config", lambda _: None)
    check_architecture(runner(), flag)
    check_architecture(runner(sliding_window_size=-1), flag)
    with pytest.raises(ValueError, match=f"{flag}: SomeForCausalLM"):
        check_architecture(runner(**{field: value}), flag)


def test_recurrent_state_is_refused(monkeypatch):
    """Red if a mamba target is served: its state cannot be cut back."""
    from sglang.srt.configs import hybrid_arch

    monkeypatch.setattr(hybrid_arch, "mambaish_config", lambda _: object())
    with pytest.raises(ValueError, match="recurrent state"):
        check_architecture(runner(), "--model-path")


def head_args(path, tmp_path, **changes):
    """Server arguments and settings with a head of the embedded one's config."""
    config = json.loads((HEAD_PATH / "config.json").read_text()) | changes
    (tmp_path / "config.json").write_text(json.dumps(config))
    args = SimpleNamespace(model_path=str(TARGET_PATH), trust_remote_code=False)
    return args, ParseConfig(compose="eagle3", eagle_model_path=str(path))


def test_the_embedded_head_fits_the_embedded_target(tmp_path):
    """Red if a good head is refused."""
    check_head(*head_args(HEAD_PATH, tmp_path))
    check_head(SimpleNamespace(), ParseConfig())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "is LlamaForCausalLM; expected"),
        ({"hidden_size": 256}, "a target of hidden size 256; --model-path has 128"),
        ({"target_hidden_size": 64}, "a target of hidden size 64"),
        ({"vocab_size": 32000}, "vocabulary size 32000; --model-path has 640"),
    ],
    ids=str,
)
def test_a_head_of_another_target_is_refused(tmp_path, changes, message):
    """Red if such a head is found out by a crash in a matrix product."""
    with pytest.raises(ValueError, match="eagle-model-path is ") as error:
        check_head(*head_args(tmp_path, tmp_path, **changes))
    assert message in str(error.value)


def test_a_head_that_is_not_there_is_refused(tmp_path):
    """Red if a mistyped path gives a trace instead of a sentence."""
    with pytest.raises(ValueError, match="eagle-model-path is .*holds no model"):
        check_head(*head_args(tmp_path / "nowhere", tmp_path))
